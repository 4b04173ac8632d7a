"""Host buffers that are reused, because page-locking memory for a GPU costs more than filling it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from sternway.saved.stores._copies import Ticket

_GRAIN = 2**16


@dataclass(slots=True, eq=False)
class Buffer:
    """A host buffer, and the copy from it that may still be under way."""

    data: Tensor
    after: Ticket | None = None


class Pool:
    """Buffers of at most ``limit`` bytes together, kept for reuse until ``clear()``."""

    def __init__(self, limit: int, pinned: bool) -> None:
        self.limit, self._pinned = limit, pinned
        self._free: dict[int, list[Buffer]] = {}  # by size
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def taken_bytes(self) -> int:
        return self._taken

    @property
    def free_bytes(self) -> int:
        return sum(size * len(buffers) for size, buffers in self._free.items())

    def take(self, size: int, *, wait: bool = False) -> Buffer | None:
        """A buffer of at least ``size`` bytes; None if that would be more than the limit, unless told to wait.

        When nothing else is taken, a single buffer may be larger than the limit, so that work goes on.
        """
        size = -(-max(size, 1) // _GRAIN) * _GRAIN
        with self._changed:
            while True:
                found = self._reuse(size) if size in self._free else self._reuse(self._nearest(size))
                if found is not None:
                    return found
                while self._free and self._taken + self.free_bytes + size > self.limit:
                    self._drop_one()
                if self._taken + size <= self.limit or (wait and not self._taken):
                    break
                if not wait:
                    return None
                self._changed.wait()
            self._taken += size
        try:
            return Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
        except BaseException:
            with self._changed:
                self._taken -= size
            raise

    def _nearest(self, size: int) -> int:
        return min((known for known in self._free if size <= known <= 2 * size), default=0)

    def _reuse(self, size: int) -> Buffer | None:
        if size not in self._free:
            return None
        buffer = self._free[size].pop()
        if not self._free[size]:
            del self._free[size]
        self._taken += size
        return buffer

    def _drop_one(self) -> None:
        size, buffers = next(iter(self._free.items()))
        buffers.pop()
        if not buffers:
            del self._free[size]

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        with self._changed:
            size = buffer.data.numel()
            self._taken -= size
            self._free.setdefault(size, []).append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Free the buffers that nobody uses."""
        with self._changed:
            self._free.clear()


def half_of_memory() -> int:
    """Half of this machine's memory, in bytes."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 2**33
