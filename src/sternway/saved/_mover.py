"""Copies between a device and the host: on CUDA, on side streams; on the CPU, at once.

    compute  ──F──●────────F────────●──▶ … ──●──B──●──▶
                  │ready            ▲joined  │room ▲joined
    out      ─────▶ device → host ──┘        │     │          one stream, in the order of packing
    back                                     ▶ ────┘          another, so that both directions of the link are used

Memory is given back in the order of the compute stream: whoever drops a device tensor has made that stream wait for the
copy first, so no allocation needs to be held back and the CPU may run far ahead.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sternway.saved._ticket import Done, Ticket, Wait


class Mover(ABC):
    """Moves flat byte tensors, and marks moments of the computation."""

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
        """This moment of the computation."""

    @abstractmethod
    def times(self, marks: Sequence[Any]) -> list[float]:
        """The moments in seconds since the first; blocks until they have come."""


class CpuMover(Mover):
    """Copies at once: between tensors of the CPU there is no link to hide."""

    pinned = False

    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        target.copy_(source)
        return Done()

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        target.copy_(source)
        return Done()

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
        """Let ``side`` come after what was asked for so far."""
        ready = _event()
        ready.record(torch.cuda.current_stream(self.device))
        side.wait_event(ready)

    def out(self, source: Tensor, target: Tensor, after: Ticket | None) -> Ticket:
        self._follow(self._out)
        if isinstance(after, CudaTicket):  # the buffer may still be read for an earlier tensor
            self._out.wait_event(after.event)
        return self._copy(source, target, self._out)

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        self._follow(self._back)  # the memory of target may be in use until here
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
