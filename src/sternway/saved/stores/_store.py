"""What every store does: take flat byte tensors in, and bring them back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sternway.saved.stores._copies import Mover, Ticket, Wait, mover_for


class Arrival(ABC):
    """A tensor on its way back; it may be used after ``join()``."""

    @abstractmethod
    def join(self) -> tuple[Tensor, Wait | None]:
        """The tensor, for whatever is computed from now on, and how long that waited."""

    @abstractmethod
    def drop(self) -> None:
        """Give it up unused: the copy may still be writing to it."""


class Away(ABC):
    """One flat tensor in a store."""

    out: Ticket
    """The copy into the store."""

    @abstractmethod
    def back(self) -> Arrival:
        """Start to bring it back to its device."""

    @abstractmethod
    def free(self) -> None:
        """Free its place in the store."""


class Store(ABC):
    """A place for flat byte tensors."""

    name: str

    def __init__(self) -> None:
        self.closed = False
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
            lossless: compress the bytes, if this store can.
        """

    @abstractmethod
    def rates(self, device: torch.device) -> tuple[float, float]:
        """Bytes per second to this store and back, measured now."""

    def raise_failure(self) -> None:  # noqa: B027 - memory does not fail later
        """Raise the error of a background write, once."""

    def opened(self) -> None:  # noqa: B027 - memory needs no preparation
        """A ``with`` block begins."""

    def close(self) -> None:
        """End threads, and remove buffers and files; no ``with`` block can begin afterwards."""
        self.closed = True

    @abstractmethod
    def idle(self, forget: bool) -> None:
        """Called when the store is empty and no ``with`` block is open; ``forget``: free the buffers as well."""
