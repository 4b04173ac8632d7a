"""Sums and copies over some ranks, on the backend of the pipeline's device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from sternway._torch import distributed


class Collective(ABC):
    """Some processes that work on a tensor together. Each call returns a work to wait for.

    Attributes:
        size: how many processes.
    """

    size: int

    @abstractmethod
    def sum(self, tensor: Tensor) -> Any:
        """Start to replace a tensor by its sum over the processes."""

    @abstractmethod
    def copy(self, tensor: Tensor, source: int) -> Any:
        """Start to overwrite a tensor by that of one process, given its place among them."""


@final
class GlooCollective(Collective):
    """Over a process group of torch."""

    def __init__(self, group: Any) -> None:
        self._group, self.size = group, dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def copy(self, tensor: Tensor, source: int) -> Any:
        return dist.broadcast(tensor, group_src=source, group=self._group, async_op=True)


@final
class NcclCollective(Collective):
    """Over a communicator. To wait makes the current stream wait, and not the host."""

    def __init__(self, communicator: Any, size: int) -> None:
        self._communicator, self.size = communicator, size

    def sum(self, tensor: Tensor) -> Any:
        return distributed.start_sum(self._communicator, tensor)

    def copy(self, tensor: Tensor, source: int) -> Any:
        return distributed.start_copy(self._communicator, tensor, source)
