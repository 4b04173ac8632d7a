"""Which files of a tree get pages, and for each of the others the reason.

Symbolic links are not followed. ``.gitignore`` files are obeyed as git does, also those above the source in the same
repository. Folders of version control systems and our own output are skipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from sternway.atlas._paths import shown
from sternway.atlas.read._text import LARGEST, is_binary
from sternway.errors import AtlasError

MARK = ".atlas"  # a folder with this name inside marks our own output
_VERSION_CONTROL = {".git", ".hg", ".svn", ".jj"}


class FileProblem(NamedTuple):
    """A file that gets no page, or could be read only in part."""

    path: str
    kind: str  # "binary", "too large", "link", "unreadable", "encoding", "syntax", "ignored", "special", "output"
    text: str


class SourceFile(NamedTuple):
    """A file with a page. ``path`` is relative to the source, with slashes."""

    path: str
    size: int


class Tree(NamedTuple):
    root: Path
    files: tuple[SourceFile, ...]
    folders: tuple[str, ...]  # those with pages, "" first
    problems: tuple[FileProblem, ...]


class _Rules(NamedTuple):
    """A ``.gitignore`` and the folder it governs (absolute)."""

    folder: str
    spec: GitIgnoreSpec


def walk(source: Path, out: Path, include: tuple[str, ...] = ()) -> Tree:
    """List every file below ``source``, ordered by name.

    Args:
        source: a folder.
        out: the output folder; skipped if it is inside the source.
        include: patterns as in a ``.gitignore``; if any are given, only files that match one get pages.
    """
    root = source.resolve()
    if not root.is_dir():
        raise AtlasError(
            "SOURCE must be a folder", got=f"{source}, which is not one", fix="name the root of a source tree"
        )
    wanted = GitIgnoreSpec.from_lines(include) if include else None
    walker = _Walker(root, out.resolve(), wanted)
    walker.folder(str(root), "", _above(root))
    files = tuple(sorted(walker.files))
    if include and not files:
        raise AtlasError(
            "--include must match a file below SOURCE",
            got=", ".join(map(repr, include)),
            fix="write patterns as in a .gitignore, such as '*.py', and quote them",
        )
    folders = {""}
    for entry in files:
        parts = entry.path.split("/")[:-1]
        folders.update("/".join(parts[: index + 1]) for index in range(len(parts)))
    return Tree(root, files, tuple(sorted(folders)), tuple(sorted(walker.problems)))


class _Walker:
    def __init__(self, root: Path, out: Path, wanted: GitIgnoreSpec | None) -> None:
        self.root, self.out, self.wanted = root, str(out), wanted
        self.files: list[SourceFile] = []
        self.problems: list[FileProblem] = []

    def folder(self, absolute: str, path: str, rules: tuple[_Rules, ...]) -> None:
        """Visit a folder and those below it, without recursion: folders may be nested deeply."""
        waiting = [(absolute, path, rules)]
        while waiting:
            absolute, path, rules = waiting.pop()
            try:
                entries = sorted(os.scandir(absolute), key=lambda entry: entry.name)
            except OSError as error:
                self._say(path, "unreadable", f"the folder cannot be listed: {error.strerror}")
                continue
            rules = (*rules, *_read_rules(absolute))
            for entry in entries:
                child = f"{path}/{entry.name}" if path else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if self._enters(entry, child, rules):
                        waiting.append((entry.path, child, rules))
                else:
                    self._file(entry, child, rules)

    def _enters(self, entry: os.DirEntry[str], path: str, rules: tuple[_Rules, ...]) -> bool:
        if entry.name in _VERSION_CONTROL or entry.path == self.out:
            return False  # not reported: the first run and the second must report the same
        if os.path.isdir(os.path.join(entry.path, MARK)):
            self._say(path, "output", "pages that this program wrote")
            return False
        if _ignored(entry.path + "/", rules):
            self._say(path, "ignored", "a .gitignore names it")
            return False
        return True

    def _file(self, entry: os.DirEntry[str], path: str, rules: tuple[_Rules, ...]) -> None:
        if self.wanted is not None and not self.wanted.match_file(path):
            return
        if _ignored(entry.path, rules):
            self._say(path, "ignored", "a .gitignore names it")
        elif entry.is_symlink():
            self._say(path, "link", _link(entry.path, self.root))
        else:
            self._plain(entry, path)

    def _plain(self, entry: os.DirEntry[str], path: str) -> None:
        try:
            info = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                self._say(path, "special", "neither a file nor a folder: a pipe, a socket or a device")
                return
            with open(entry.path, "rb") as file:
                start = file.read(8192)
        except OSError as error:
            self._say(path, "unreadable", f"cannot be read: {error.strerror}")
            return
        if is_binary(start):
            self._say(path, "binary", f"{info.st_size:,} bytes")
        elif info.st_size > LARGEST:
            self._say(path, "too large", f"{info.st_size:,} bytes of text; pages stop at {LARGEST:,}")
        else:
            self.files.append(SourceFile(path, info.st_size))

    def _say(self, path: str, kind: str, text: str) -> None:
        self.problems.append(FileProblem(path, kind, text))


def _link(path: str, root: Path) -> str:
    """Where a symbolic link leads; it is never followed."""
    try:
        target = Path(path).resolve(strict=True)
    except (OSError, RuntimeError):  # Python 3.11 and 3.12 raise the second for a circle
        return "a symbolic link that leads nowhere or in a circle; not followed"
    if target.is_relative_to(root):
        return f"a symbolic link to {shown(target.relative_to(root).as_posix())}; not followed"
    return "a symbolic link out of the tree; not followed"


def _read_rules(folder: str) -> Iterator[_Rules]:
    try:
        with open(os.path.join(folder, ".gitignore"), encoding="utf-8", errors="replace") as file:
            yield _Rules(folder, GitIgnoreSpec.from_lines(file))
    except (OSError, ValueError):
        return


def _above(root: Path) -> tuple[_Rules, ...]:
    """The rules of folders above the source, up to the repository's top.

    None outside a repository, and none if they ignore the source itself: a user who passes it wants its pages.
    """
    found: list[_Rules] = []
    for folder in root.parents:
        if (root / ".git").exists():
            return ()
        found[:0] = _read_rules(str(folder))
        if (folder / ".git").exists():
            way = [root, *root.parents]
            hidden = any(_ignored(f"{one}/", tuple(found)) for one in way[: way.index(folder)])
            return () if hidden else tuple(found)
    return ()


def _ignored(path: str, rules: tuple[_Rules, ...]) -> bool:
    """As in git, the nearest ``.gitignore`` with a matching pattern decides."""
    for rule in reversed(rules):
        if not path.startswith(rule.folder):
            continue
        verdict = rule.spec.check_file(path[len(rule.folder) + 1 :]).include
        if verdict is not None:
            return verdict
    return False
