"""Sums and copies over some ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sternway._torch import distributed


class Collective:
    """Some processes that work on a tensor together.

    Each call returns a work to wait for. Over NCCL, to wait makes the current stream wait, and not the host.

    Attributes:
        size: how many processes.
    """

    def __init__(self, communicator: Any, size: int) -> None:
        self._communicator, self.size = communicator, size

    def sum(self, tensor: Tensor) -> Any:
        """Start to replace a tensor by its sum over the processes."""
        return distributed.start_sum(self._communicator, tensor)

    def copy(self, tensor: Tensor, source: int) -> Any:
        """Start to overwrite a tensor by that of one process, given its place among them."""
        return distributed.start_copy(self._communicator, tensor, source)
