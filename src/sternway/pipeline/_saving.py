"""What ``save`` and ``resume`` give back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointWarning(UserWarning):
    """A checkpoint that was passed over, and why."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on.

    Attributes:
        step: the step that was passed to ``save``.
        data: what was passed to ``save`` as the position in the data.
        path: the checkpoint.
    """

    step: int
    data: Any
    path: Path


class Saving:
    """A checkpoint that is being written by a thread; ``wait`` until it is whole.

    Attributes:
        stall_seconds: for how long training waited for it.
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
        """Whether it is whole, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's folder, once it is whole.

        Raises:
            CheckpointError: on every rank, if one could not write its part.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path
