"""What a run stores for the next one, in ``.atlas`` inside the output: a manifest, and the facts of each file.

All of it is JSON: an output folder may come from someone else, and reading it must not run code.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import stat
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from sternway.atlas.pages._links import Links
from sternway.atlas.read import _ctags
from sternway.atlas.read._tree import MARK

_MANIFEST = "manifest.json.z"
_GRAMMARS = ("c", "cpp", "cuda", "javascript", "typescript")
_USED = ("jinja2", "pygments", "pathspec", "pyyaml", "tree-sitter", *(f"tree-sitter-{name}" for name in _GRAMMARS))


class Written(NamedTuple):
    """A page on disk: the digest of its inputs, and the digest and size of its content."""

    inputs: str
    digest: str
    size: int


class SiteManifest(NamedTuple):
    """What a run read and wrote."""

    generator: str
    options: str
    sources: dict[str, str]  # path: SHA-256
    pages: dict[str, Written]
    problems: tuple[tuple[str, str, str], ...]
    broken: tuple[tuple[str, str], ...]
    lines: int
    languages: dict[str, int]
    unresolved: int


def digest(*parts: str | bytes) -> str:
    """One digest of several parts and their lengths."""
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        whole.update(b"%d:" % len(data))
        whole.update(data)
    return whole.hexdigest()


@functools.cache
def generator() -> str:
    """A digest of our own files and the versions of the libraries used. If it changes, every page is made again."""
    own = Path(__file__).parents[1]
    files = sorted(path for path in own.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    content = [part for path in files for part in (path.relative_to(own).as_posix(), path.read_bytes())]
    used = [importlib.metadata.version(name) for name in _USED]
    return digest(*content, _griffe_version(), *used, _ctags.version(), sys.version)


def _griffe_version() -> str:
    """The package ``griffe`` comes from the distribution griffelib since version 2, before that from griffe."""
    try:
        return importlib.metadata.version("griffelib")
    except importlib.metadata.PackageNotFoundError:
        return importlib.metadata.version("griffe")


def facts_file(out: Path, path: str) -> Path:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return out / MARK / "facts" / name[:2] / f"{name[2:24]}.json.z"


def write(path: Path, text: str | bytes) -> tuple[str, int, bool]:
    """Write a file atomically; return its digest, its size, and whether its content changed."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
    found = hashlib.sha256(data).hexdigest(), len(data)
    if _has(path, data):
        return *found, False
    beside = path.with_name(f"{path.name}~")
    try:
        beside.write_bytes(data)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
    os.replace(beside, path)
    return *found, True


def _has(path: Path, data: bytes) -> bool:
    try:
        info = os.lstat(path)
        return stat.S_ISREG(info.st_mode) and info.st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def load(out: Path) -> SiteManifest | None:
    """The manifest of the last run; None if there is none, or it cannot be read."""
    try:
        raw = json.loads(zlib.decompress((out / MARK / _MANIFEST).read_bytes()))
        pages = {str(path): Written(*row) for path, row in raw["pages"].items() if _inside(str(path))}
        return SiteManifest(
            raw["generator"],
            raw["options"],
            raw["sources"],
            pages,
            tuple(tuple(row) for row in raw["problems"]),
            tuple(tuple(row) for row in raw["broken"]),
            raw["lines"],
            raw["languages"],
            raw["unresolved"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zlib.error):
        return None


def _inside(path: str) -> bool:
    """Whether a path is inside the output folder; a manifest that names others is not trusted."""
    return not path.startswith("/") and ".." not in path.split("/") and "\\" not in path and "\0" not in path


def save(out: Path, manifest: SiteManifest) -> None:
    text = json.dumps(manifest._asdict(), ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    write(out / MARK / _MANIFEST, zlib.compress(text.encode("ascii"), 6))


def load_links(out: Path) -> dict[str, Links]:
    try:
        raw = json.loads(zlib.decompress((out / MARK / "links.json.z").read_bytes()))
        return {
            page: Links(lines, tuple(anchors), tuple((path, line, tuple(more)) for path, line, more in targets))
            for page, (lines, anchors, targets) in raw.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, zlib.error):
        return {}


def save_links(out: Path, links: dict[str, Links]) -> None:
    text = json.dumps(links, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    write(out / MARK / "links.json.z", zlib.compress(text.encode("ascii"), 1))
