"""What ``save`` and ``resume`` return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training continues.

    Attributes:
        step: what was passed to ``save``.
        data: what was passed to ``save``.
        path: the checkpoint.
    """

    step: int
    data: Any
    path: Path


class Saving:
    """A checkpoint that a thread is writing; ``wait`` until it is complete.

    Attributes:
        stall_seconds: how long training waited for it.
    """

    def __init__(self, work: Callable[[], Path]) -> None:
        self.stall_seconds = 0.0
        self._work = work
        self._error: Exception | None = None
        self._path: Path | None = None
        self._thread = threading.Thread(target=self._run, name="sternway-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is complete; returns its folder.

        Raises:
            CheckpointError: on every rank, if one could not write its part.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
