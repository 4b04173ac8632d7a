"""Which files change together, from the history of the git repository around a source tree."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_COMMITS = 2000  # the newest; older ones say little about today's files
_LARGEST = 25  # files of a commit; larger ones are moves and formatting
_LEAST = 3  # commits in common
_MOST = 6  # files listed for one file
_SECONDS = 60.0


class CoChange(NamedTuple):
    """Another file, in how many commits both changed, and in how many this one did."""

    path: str
    together: int
    commits: int


def head(root: Path) -> str:
    """The commit that is checked out; empty where there is no repository or no git."""
    return _git(root, "rev-parse", "HEAD").strip()


def co_changes(root: Path, paths: Iterable[str]) -> dict[str, tuple[CoChange, ...]]:
    """For each file, those that changed with it in at least three commits and a third of its own commits."""
    known = set(paths)
    text = _git(
        root, "log", f"-{_COMMITS}", "--no-merges", "--name-only", "--relative", "--format=%x01", "-z", "--", "."
    )
    commits: Counter[str] = Counter()
    pairs: dict[str, Counter[str]] = defaultdict(Counter)
    for part in text.split("\x01"):
        files = sorted({name for name in part.replace("\n", "").split("\0") if name in known})
        commits.update(files)
        if 1 < len(files) <= _LARGEST:
            for one in files:
                pairs[one].update(other for other in files if other != one)
    found = {}
    for path, others in pairs.items():
        good = [
            CoChange(other, count, commits[path])
            for other, count in others.items()
            if count >= _LEAST and 3 * count >= commits[path]
        ]
        if good:
            found[path] = tuple(sorted(good, key=lambda row: (-row.together, row.path))[:_MOST])
    return found


def _git(root: Path, *arguments: str) -> str:
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.decode("utf-8", "surrogateescape") if run.returncode == 0 else ""
