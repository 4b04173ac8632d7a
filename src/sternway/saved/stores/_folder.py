"""A temporary folder in the user's directory, which does not outlive its process for long.

The folder holds a file that its process keeps locked. The kernel unlocks the file when the process ends, however it
ends; so a folder whose lock can be taken is an orphan, and the next process that uses the directory removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from sternway.errors import SavedError

try:
    import fcntl
except ImportError:  # not a system with flock
    fcntl = None  # type: ignore[assignment]

_PREFIX, _LOCK, _NEW = "sternway-saved-", "lock", "new-lock"


class DiskFolder:
    """Made when it is opened, removed when it is closed."""

    def __init__(self, directory: Path) -> None:
        if fcntl is None:
            raise SavedError('to="disk" needs file locks (flock)', got=f"the system {os.name!r}", fix='use to="cpu"')
        self.directory = directory
        self.path: Path | None = None
        self._lock: IO[bytes] | None = None

    def open(self) -> Path:
        """The folder's path; made and locked if it does not exist."""
        if self.path is None:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.directory))
            lock = (path / _NEW).open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
            (path / _NEW).rename(path / _LOCK)  # locked when others can see it
            self.path, self._lock = path, lock
        return self.path

    def close(self) -> None:
        """Remove the folder with everything in it."""
        path, lock, self.path, self._lock = self.path, self._lock, None, None
        if path is not None and lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            lock.close()

    def free_bytes(self) -> int:
        """Free bytes of the file system, less one part in a hundred."""
        stats = os.statvfs(self.directory)
        return int(stats.f_frsize * (stats.f_bavail - stats.f_blocks // 100))


def remove_orphans(directory: Path) -> list[Path]:
    """Remove the folders that killed processes left in ``directory``, and return their paths."""
    removed = []
    for path in directory.glob(_PREFIX + "*"):
        try:
            lock = (path / _LOCK).open("rb")
        except FileNotFoundError:  # being made, or being removed, by a process that lives; or killed in between
            if {each.name for each in path.iterdir()} <= {_NEW} and _old(path):
                shutil.rmtree(path, ignore_errors=True)
            continue
        except OSError:  # another user's
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # in use
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > 60
