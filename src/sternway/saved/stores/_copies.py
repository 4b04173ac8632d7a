"""Copies between a device and the host, and tickets for those under way.

    compute  ──F──●────────F────────●──▶ … ──●──B──●──▶
                  │ready            ▲joined  │room ▲joined
    out      ─────▶ device → host ──┘        │     │          one stream, in the order of packing
    back                                     ▶ ────┘          another, so that both directions of the link are used

On CUDA copies run on side streams; on the CPU they happen at once. Device memory is freed in the order of the compute
stream: that stream is made to wait for the copy before the tensor is dropped, so no allocation is held back and the CPU
may run far ahead.

Everything that moves bytes returns a ticket. The offloader asks no clock and no stream, only tickets; so the code that
runs on a GPU is the code that tests run on a CPU.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

Clock = Callable[[], float]


class Wait(ABC):
    """How long the computation waited; on a GPU this is known only later."""

    @abstractmethod
    def over(self) -> bool:
        """Whether the time is known."""

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
    """One copy, or one write, that may still be under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has finished, seen from the CPU."""

    @abstractmethod
    def join(self) -> Wait | None:
        """Order whatever is computed from now on after it; how long that waited, if at all."""

    def let_go(self, tensor: Tensor) -> None:  # noqa: B027 - most tickets need nothing
        """Make it safe to drop ``tensor``, which the copy may still be reading."""


class Finished(Ticket):
    """A copy that was made at once."""

    def done(self) -> bool:
        return True

    def join(self) -> Wait | None:
        return None


class Threaded(Ticket):
    """A write in a thread, after a copy to the host if the tensor was on a GPU."""

    def __init__(self, future: Future[None], clock: Clock, copied: Ticket | None = None) -> None:
        self._future, self._clock, self._copied = future, clock, copied

    def done(self) -> bool:
        return self._future.done()

    def join(self) -> Wait | None:
        start = self._clock()
        self._future.result()
        return Waited(self._clock() - start)

    def let_go(self, tensor: Tensor) -> None:
        if self._copied is not None:
            self._copied.let_go(tensor)


class Mover(ABC):
    """Copies flat byte tensors between one device and the host."""

    pinned: bool
    """Whether host buffers should be page-locked."""

    @abstractmethod
    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        """Copy ``source`` (device) to ``target`` (host), not before ``after``."""

    @abstractmethod
    def back(self, source: Tensor, target: Tensor) -> Ticket:
        """Copy ``source`` (host) to ``target`` (device)."""

    @abstractmethod
    def mark(self) -> Any:
        """A timestamp in the order of the computation."""

    @abstractmethod
    def times(self, marks: Sequence[Any]) -> list[float]:
        """The timestamps in seconds since the first; blocks until the device has reached them."""


class CpuMover(Mover):
    """Copies at once: there is no link between CPU tensors to hide."""

    pinned = False

    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        target.copy_(source)
        return Finished()

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        target.copy_(source)
        return Finished()

    def mark(self) -> float:
        return time.perf_counter()

    def times(self, marks: Sequence[float]) -> list[float]:
        return [mark - marks[0] for mark in marks]


def _event(*, timing: bool = False) -> Any:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _EventWait(Wait):
    def __init__(self, start: Any, end: Any) -> None:
        self._start, self._end = start, end

    def over(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000


class CudaTicket(Ticket):
    """A copy on a side stream."""

    def __init__(self, event: Any, stream: Any) -> None:
        self.event, self._stream = event, stream

    def done(self) -> bool:
        return bool(self.event.query())

    def join(self) -> Wait | None:
        stream = torch.cuda.current_stream(self._stream.device)
        start, end = _event(timing=True), _event(timing=True)
        start.record(stream)
        stream.wait_event(self.event)
        end.record(stream)
        return _EventWait(start, end)

    def let_go(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


class CudaMover(Mover):
    """Copies on two side streams of one device."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = _new_stream(device), _new_stream(device)

    def _follow(self, side: Any) -> None:
        """Make ``side`` wait for what was queued so far."""
        ready = _event()
        ready.record(torch.cuda.current_stream(self.device))
        side.wait_event(ready)

    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        self._follow(self._out)
        if isinstance(after, CudaTicket):  # the buffer may still be read for an earlier tensor
            self._out.wait_event(after.event)
        return self._copy(source, target, self._out)

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        self._follow(self._back)  # work queued so far may still use the memory of target
        return self._copy(source, target, self._back)

    def _copy(self, source: Tensor, target: Tensor, stream: Any) -> Ticket:
        done = _event()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done.record(stream)
        return CudaTicket(done, stream)

    def mark(self) -> Any:
        event = _event(timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def times(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [float(marks[0].elapsed_time(mark)) / 1000 for mark in marks]


def mover_for(device: torch.device) -> Mover:
    """What moves tensors of ``device``."""
    return CudaMover(device) if device.type == "cuda" else CpuMover()
