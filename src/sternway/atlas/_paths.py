"""The paths of pages: safe in every file system and in links, and one for each path of the source.

Letters, digits and ``. _ - +`` are kept; every other byte becomes ``~`` and two hex digits. So a page's path is also
its URL, and no name of a source file can lead out of the output folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import posixpath
import re
import urllib.parse

_UNSAFE = re.compile(rb"[^A-Za-z0-9._+\-]")
_OURS = re.compile(
    r"(index|doc|sub(\.\d+)?|reading(_\d+)?|backward)\.(md|html)|.*_(docs|kw(\.\d+)?|source)\.(md|html)|_site|\.atlas"
)
_LONGEST = 180
_cached = functools.lru_cache(maxsize=1 << 16)  # the same few thousand paths are asked for millions of times


def safe(name: str, *, folder: bool = False) -> str:
    """One part of a source path, as part of a page's path.

    Example:
        >>> safe("a b<script>.py"), safe(".."), safe("index.md", folder=True)
        ('a~20b~3cscript~3e.py', '~2e.', '~69ndex.md')
    """
    raw = os.fsencode(name)
    made = _UNSAFE.sub(lambda match: b"~%02x" % match[0][0], raw).decode("ascii")
    if set(made) == {"."} or (folder and _OURS.fullmatch(made)):
        made = f"~{ord(made[0]):02x}{made[1:]}"
    if len(made) > _LONGEST:
        made = f"{made[: _LONGEST - 20]}~~{hashlib.sha256(raw).hexdigest()[:16]}"
    return made


@_cached
def folder_of(path: str) -> str:
    """The output folder for a source folder ("" is the top)."""
    return "/".join(safe(part, folder=True) for part in path.split("/")) if path else ""


@_cached
def file_page(path: str, suffix: str) -> str:
    """The page of a source file: ``file_page("a/b.py", "_docs.md")`` is ``a/b.py_docs.md``."""
    parent, _, name = path.rpartition("/")
    return posixpath.join(folder_of(parent), safe(name) + suffix)


def folder_page(path: str, name: str) -> str:
    return posixpath.join(folder_of(path), name)


@_cached
def link(page: str, target: str) -> str:
    """The relative link from one page to another. Both paths are normal, so nothing is asked of the file system."""
    start, end = page.split("/")[:-1], target.split("/")
    same = 0
    while same < min(len(start), len(end)) and start[same] == end[same]:
        same += 1
    return "/".join([*[".."] * (len(start) - same), *end[same:]])


@_cached
def shown(path: str) -> str:
    """A source path to display: characters that cannot be printed are escaped."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


@_cached
def anchor_of(name: str) -> str:
    """The anchor of a definition on the page of its file."""
    return "d-" + re.sub(r"[^\w.:~-]", lambda match: f"-{ord(match[0]):x}-", name)


@_cached
def source_link(page: str, base: str, path: str) -> str:
    """The link from a Markdown page to a source file. ``base``: an address, or a path relative to the output folder."""
    whole = f"{base.rstrip('/')}/{urllib.parse.quote(os.fsencode(path))}"
    return whole if "://" in base else "../" * page.count("/") + whole
