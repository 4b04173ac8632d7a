"""The absolute module name of each Python file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class ModuleName(NamedTuple):
    """``package`` is where the file's relative imports start."""

    module: str
    package: str


def names(root: Path, paths: Iterable[str]) -> dict[str, ModuleName]:
    """A name for every Python file.

    It starts at the topmost folder around the file that has an ``__init__.py``, also above the source. A file outside
    a package is named by itself, as a script is.
    """
    paths = list(paths)
    packages = {path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] in ("__init__.py", "__init__.pyi")}
    above = _above(root) if "" in packages or (root / "__init__.py").exists() else []
    return {path: _name(path, packages, above) for path in paths if path.endswith((".py", ".pyi", ".pyw"))}


def _above(root: Path) -> list[str]:
    parts = [root.name]
    for folder in root.parents:
        if not (folder / "__init__.py").exists():
            break
        parts.insert(0, folder.name)
    return parts


def _name(path: str, packages: set[str], above: list[str]) -> ModuleName:
    *folders, file = path.split("/")
    start = len(folders)
    for depth in range(len(folders) + 1):
        if "/".join(folders[:depth]) in packages or (depth == 0 and above):
            start = depth
            break
    parts = [*above, *folders] if start == 0 and above else folders[max(start - 1, 0) :]
    if start == len(folders) and "/".join(folders) not in packages and not (start == 0 and above):
        parts = []  # in no package
    stem = file.rpartition(".")[0]
    if stem == "__init__":
        return ModuleName(".".join(parts), ".".join(parts))
    return ModuleName(".".join([*parts, stem]), ".".join(parts))
