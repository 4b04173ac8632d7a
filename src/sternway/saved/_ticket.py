"""Work that was asked for and goes on elsewhere: a copy on a side stream, a write in a thread.

Everything that moves bytes gives back a ticket. The engine never asks a clock or a stream, only tickets; so the code
that runs on a GPU is the code that tests run on a CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from torch import Tensor


class Wait(ABC):
    """How long somebody waited, known at once or later."""

    @abstractmethod
    def over(self) -> bool:
        """Whether it is known."""

    @abstractmethod
    def seconds(self) -> float:
        """The time waited; blocks until it is known."""


class Waited(Wait):
    """A wait that is over."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class Ticket(ABC):
    """One piece of work under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it is over, seen from the CPU."""

    @abstractmethod
    def join(self) -> Wait | None:
        """Let whatever is computed from now on come after it; how long that took, if it took any time."""

    def let_go(self, tensor: Tensor) -> None:  # noqa: B027 - most tickets need nothing
        """Make it safe to drop ``tensor``, which the work may still be reading."""


class Done(Ticket):
    """Work that was over before it could be waited for."""

    def done(self) -> bool:
        return True

    def join(self) -> Wait | None:
        return None


class Threaded(Ticket):
    """Work in a thread; its result may be a ticket for what the thread asked for in turn."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done() and (not isinstance(then := self._then(), Ticket) or then.done())

    def join(self) -> Wait | None:
        start = time.perf_counter()
        then = self._future.result()
        waited = Waited(time.perf_counter() - start)
        if isinstance(then, Ticket):
            then.join()
        return waited

    def _then(self) -> Any:
        return None if self._future.exception() is not None else self._future.result()
