"""Notice a GPU that waits for too long, or that fails.

The host does not wait for messages between GPUs, so no call of it can time out, and a rank that hangs but lives is not
missed. Instead, a thread waits for the end of one step after the other on the GPU: ``waits`` says for how long by now.
If the GPU fails, the thread sees that whatever the host is doing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol


class StepEnd(Protocol):
    """Something to wait for: an event on a stream."""

    def synchronize(self) -> None:
        """Return when it has happened. Other threads run meanwhile."""


class StreamWatch:
    """Waits for the ends of steps on a GPU, in a thread of its own, until ``stop``.

    Args:
        failed: called in the thread if the GPU fails, with the first line of the error.
        clock: the time in seconds.
    """

    def __init__(self, failed: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._failed, self._clock = failed, clock
        self._posting: float | None = None  # since when the host is in a step
        self._running: float | None = None  # since when the GPU is in the step that the thread waits for
        self._ends: queue.SimpleQueue[tuple[float, StepEnd] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """The host sends or receives the first message of a step."""
        if self._posting is None:
            self._posting = self._clock()

    def end(self, end: StepEnd) -> None:
        """The host is done with a step; the GPU will be at ``end``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="sternway-stream", daemon=True)
            self._thread.start()
        self._ends.put((self._posting or self._clock(), end))
        self._posting = None

    def waits(self) -> float:
        """For how many seconds the GPU has been in its present step, the one that the host posts included."""
        since = [each for each in (self._posting, self._running) if each is not None]
        return self._clock() - min(since) if since else 0.0

    def stop(self) -> None:
        """Wait for no further step."""
        self._ends.put(None)
        self._posting = None

    def _follow(self) -> None:
        last = float("-inf")  # a step does not begin before the last one has ended
        while (item := self._ends.get()) is not None:
            began, end = item
            self._running = max(began, last)
            try:
                end.synchronize()
            except RuntimeError as error:
                self._running = None
                self._failed(str(error).partition("\n")[0])
                return
            last, self._running = self._clock(), None
