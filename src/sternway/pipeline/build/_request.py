"""The arguments of ``Pipeline`` that decide the stages and the schedule, as one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sternway.errors import PipelineError
from sternway.pipeline.build._link import ShardLink
from sternway.pipeline.build._rank_bytes import Shards
from sternway.pipeline.build._shard_stage import ShardFn
from sternway.pipeline.build._weights import Weights
from sternway.pipeline.step._stage import LossFn
from sternway.saved import Offload
from sternway.schedule import Schedule, names


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of ``Pipeline`` that decide the stages and the schedule."""

    stages: Mapping[int, nn.Module] | nn.Module
    schedule: Schedule | str
    ranks: int
    n_microbatches: int | None = None
    memory_limit: float | None = None
    cuts: Sequence[str] | str = "balanced"
    loss_fn: LossFn | None = None
    sample: Any = None
    sample_target: Any = None
    weights: Weights | None = None
    device: torch.device | None = None
    everyone: Sequence[int] | None = None  # the processes of all copies of the pipeline, if there are copies
    memory: int | None = None  # bytes of a rank
    shard: ShardFn | None = None
    shards: Shards | None = None  # what that makes of the parameters of stages
    tune: bool = True  # whether "auto" may change its plan later
    gathered: int | None = None  # how many sharded stages a rank keeps gathered; if None, as many as fit
    link: ShardLink | None = None  # what gathers and reduces them
    offload: Callable[[], Offload] | None = None  # makes what moves microbatches, if a plan may
    offload_rate: float | None = None  # bytes in a second; to be measured if it is None


def check_copies(schedule: Schedule | str) -> None:
    """Raise for a schedule of several copies of the model, such as dualpipe: a pipeline holds one."""
    copies = schedule.copies if isinstance(schedule, Schedule) else 2 if schedule in names(copies=2) else 1
    if copies > 1:
        raise PipelineError(
            "a pipeline holds one copy of the model",
            got=f"schedule {schedule.name if isinstance(schedule, Schedule) else schedule}, of {copies} copies",
            fix='pass schedule="dualpipe-v", which runs the same pairs with one copy, or "zb-v"',
        )
