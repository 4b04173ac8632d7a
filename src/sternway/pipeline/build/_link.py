"""How long does it take to gather a stage, and to reduce its gradients? By what the link of the shards carries.

Before the first step nobody has gathered anything. So some bytes are gathered and reduced over the processes that will
share shards, all of them at the same time as in training, and times are in proportion to the bytes of a stage. What
steps show replaces them (``schedule.measured_costs``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from sternway.schedule import Costs

_LEAST, _MOST = 1 << 16, 1 << 26  # bytes that are sent for it
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Seconds for each byte of whole parameters to gather them, and of whole gradients to reduce them."""

    gather: float
    reduce: float

    def priced(self, costs: Costs, sizes: Sequence[float]) -> Costs:
        """Costs with the time to gather and to reduce stages of these sizes."""
        return replace(
            costs, gather=[self.gather * size for size in sizes], reduce=[self.reduce * size for size in sizes]
        )

    @classmethod
    def slowest(cls, speeds: Sequence[Self]) -> Self:
        """What all can keep up with."""
        return cls(max(each.gather for each in speeds), max(each.reduce for each in speeds))


@dataclass(frozen=True, slots=True)
class ShardLink:
    """The processes over which the parameters of a stage are sharded.

    Attributes:
        group: their process group.
    """

    group: Any

    def measure(self, nbytes: float, device: torch.device) -> LinkSpeed:
        """Time both for about so many bytes. All processes of the group call it."""
        size = dist.get_world_size(self.group)
        count = max(1, int(min(_MOST, max(_LEAST, nbytes))) // (4 * size))
        whole, shard = torch.zeros(count * size, device=device), torch.zeros(count, device=device)
        gather = _shortest(lambda: _GATHER(whole, shard, group=self.group), whole)
        return LinkSpeed(gather, _shortest(lambda: _REDUCE(shard, whole, group=self.group), whole))


_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch before 2.13


def _shortest(run: Callable[[], Any], whole: Tensor) -> float:
    """Seconds for each byte, after a first run that sets up connections."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        run()
        if whole.is_cuda:
            torch.cuda.synchronize(whole.device)
        times.append(time.perf_counter() - start)
    return min(times[1:]) / whole.nbytes
