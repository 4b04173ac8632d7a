"""Where tensors go while they are away: an abstract place, and the host's memory as one."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sternway.saved._mover import Mover, mover_for
from sternway.saved._pool import Buffer, Pool
from sternway.saved._ticket import Ticket, Wait


class Arrival:
    """A tensor on its way back; it may be used after ``join()``."""

    def __init__(self, tensor: Tensor, ticket: Ticket) -> None:
        self._tensor, self._ticket = tensor, ticket
        self._stream = _stream(tensor)

    def join(self) -> tuple[Tensor, Wait | None]:
        """The tensor, for whatever is computed from now on, and how long that waited."""
        wait = self._ticket.join()
        if self._stream is not None and _stream(self._tensor) != self._stream:
            self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor, wait

    def drop(self) -> None:
        """Give it up unused: the copy may still be writing to it."""
        self._ticket.let_go(self._tensor)


def _stream(tensor: Tensor) -> object:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class Away(ABC):
    """One flat tensor in a store."""

    out: Ticket
    """The copy into the store."""

    @abstractmethod
    def back(self) -> Arrival:
        """Start to bring it back to its device."""

    @abstractmethod
    def free(self) -> None:
        """Give up its place in the store."""


class Store(ABC):
    """A place for flat byte tensors."""

    name: str

    def __init__(self) -> None:
        self._movers: dict[torch.device, Mover] = {}

    def mover(self, device: torch.device) -> Mover:
        """What moves tensors of ``device``."""
        if device not in self._movers:
            self._movers[device] = mover_for(device)
        return self._movers[device]

    @abstractmethod
    def send(self, flat: Tensor, itemsize: int, lossless: bool) -> Away | None:
        """Start to move a flat byte tensor here; None if there is no room.

        Args:
            flat: the bytes; the caller keeps them alive and unchanged until ``Away.out`` is done.
            itemsize: the bytes of one element, for what ``lossless`` does.
            lossless: make the bytes fewer, if this place can.
        """

    @abstractmethod
    def rates(self, device: torch.device) -> tuple[float, float]:
        """Bytes per second to this place and back, measured now."""

    def raise_failure(self) -> None:  # noqa: B027 - memory does not fail later
        """Raise what went wrong in the background, once."""

    def opened(self) -> None:  # noqa: B027 - memory needs no preparation
        """A ``with`` block begins."""

    @abstractmethod
    def idle(self, forget: bool) -> None:
        """Nothing is here and no ``with`` block is open; ``forget``: give back what would be reused, too."""


class _HostAway(Away):
    def __init__(self, store: HostStore, flat: Tensor, buffer: Buffer, out: Ticket) -> None:
        self._store, self._buffer, self._size, self._device, self.out = store, buffer, len(flat), flat.device, out

    def back(self) -> Arrival:
        target = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        ticket = self._store.mover(self._device).back(self._buffer.data[: self._size], target)
        self._buffer.after = ticket
        return Arrival(target, ticket)

    def free(self) -> None:
        self._store.pool.give(self._buffer)


class HostStore(Store):
    """The host's memory, through a pool of buffers."""

    name = "cpu"

    def __init__(self, limit: int, pinned: bool) -> None:
        super().__init__()
        self.pool = Pool(limit, pinned)

    def send(self, flat: Tensor, itemsize: int, lossless: bool) -> Away | None:
        buffer = self.pool.take(len(flat))
        if buffer is None:
            return None
        out = self.mover(flat.device).out(flat, buffer.data[: len(flat)], buffer.after)
        buffer.after = None
        return _HostAway(self, flat, buffer, out)

    def rates(self, device: torch.device) -> tuple[float, float]:
        """By four copies of 64 MiB each way, the first of which only warms up."""
        mover, size = self.mover(device), 2**26
        there = torch.empty(size, dtype=torch.uint8, device=device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=mover.pinned)
        found = []
        for outward in (True, False):
            marks = []
            for _ in range(4):
                (mover.out(there, here, None) if outward else mover.back(here, there)).join()
                marks.append(mover.mark())
            found.append(3 * size / max(mover.times(marks)[-1], 1e-9))
        return found[0], found[1]

    def idle(self, forget: bool) -> None:
        if forget:
            self.pool.clear()
