"""Sums and copies over some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sternway._torch import distributed


class Collective:
    """Some processes that work on a tensor together.

    Each call returns a work to wait for. Over NCCL, to wait makes the current stream wait, and not the host.

    Args:
        communicator: theirs.
        size: how many processes.
        start: calls a function with arguments that starts an operation.
    """

    def __init__(self, communicator: Any, size: int, start: Callable[..., Any]) -> None:
        self._communicator, self.size, self._start = communicator, size, start

    def sum(self, tensor: Tensor) -> Any:
        """Start to replace a tensor by its sum over the processes."""
        return self._start(distributed.start_sum, self._communicator, tensor)

    def copy(self, tensor: Tensor, source: int) -> Any:
        """Start to overwrite a tensor by that of one process, given its place among them."""
        return self._start(distributed.start_copy, self._communicator, tensor, source)
