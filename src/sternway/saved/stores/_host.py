"""The host's memory as a store, through a pool of buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from sternway.saved.stores._copies import Ticket, Wait
from sternway.saved.stores._pool import Buffer, Pool
from sternway.saved.stores._store import Arrival, Away, Store


class _HostArrival(Arrival):
    def __init__(self, tensor: Tensor, ticket: Ticket) -> None:
        self._tensor, self._ticket = tensor, ticket
        self._stream = _stream(tensor)

    def join(self) -> tuple[Tensor, Wait | None]:
        wait = self._ticket.join()
        if self._stream is not None and _stream(self._tensor) != self._stream:
            self._tensor.record_stream(torch.cuda.current_stream(self._tensor.device))
        return self._tensor, wait

    def drop(self) -> None:
        self._ticket.let_go(self._tensor)


def _stream(tensor: Tensor) -> object:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class _HostAway(Away):
    def __init__(self, store: HostStore, flat: Tensor, buffer: Buffer, out: Ticket) -> None:
        self._store, self._buffer, self._size, self._device, self.out = store, buffer, len(flat), flat.device, out

    def back(self) -> Arrival:
        target = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        ticket = self._store.mover(self._device).back(self._buffer.data[: self._size], target)
        self._buffer.after = ticket
        return _HostArrival(target, ticket)

    def free(self) -> None:
        self._store.pool.give(self._buffer)


class HostStore(Store):
    """Keeps tensors in the host's memory."""

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
        """Measured by four copies of 64 MiB each way, the first of which only warms up."""
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
        if forget or self.closed:
            self.pool.clear()

    def close(self) -> None:
        super().close()
        self.pool.clear()
