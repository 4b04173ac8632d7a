"""What each rank holds when it holds most, given what stages take and the order of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sternway.pipeline.build._message_bytes import message_bytes
from sternway.pipeline.build._weigh import StageWeight
from sternway.schedule import Action, Schedule, Upkeep, sharded

OPTIMIZERS = {"none": 0.0, "sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0}
"""How many times the bytes of the parameters that it trains an optimizer keeps."""


KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "working")
"""The kinds of memory of a rank, which add up."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How the parameters of all stages are sharded.

    Attributes:
        count: over how many processes.
        gathered: how many stages a rank keeps gathered at once; all its stages by default.
    """

    count: int = 1
    gathered: int | None = None

    def of(self, nbytes: float) -> int:
        """The bytes of one shard of so many."""
        return math.ceil(nbytes / self.count)


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds when it holds most.

    Attributes:
        stages: the stages of the rank.
        parameters: parameters and buffers; of those that are sharded, its shard.
        gradients: of the parameters, likewise.
        optimizer: the optimizer's state.
        activations: what F and I keep for later.
        working: what the action that runs then takes beyond that, and messages.
        messages: the most of them at any time, activations that were sent apart.
        gathered: whole parameters of sharded stages, and their gradients before they are reduced.
    """

    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    messages: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(int(getattr(self, kind)) for kind in KINDS)


def rank_bytes(
    plan: Schedule, weights: Sequence[StageWeight], optimizer: float, shards: Shards | None = None, gpus: bool = False
) -> tuple[RankBytes, ...]:
    """What each rank of a plan holds, if an optimizer keeps so many times the bytes that it trains."""
    return tuple(bytes_of_rank(plan, rank, weights, optimizer, shards, gpus) for rank in range(plan.ranks))


def bytes_of_rank(
    plan: Schedule,
    rank: int,
    weights: Sequence[StageWeight],
    optimizer: float,
    shards: Shards | None = None,
    gpus: bool = False,
) -> RankBytes:
    """What one rank of a plan holds; of sharded stages with the plan's upkeep, if it has some."""
    shards = shards or Shards()
    if shards.count > 1 and not plan.gathered:
        plan = sharded(plan, gathered=shards.gathered)
    mine = [weights[stage] for stage in plan.placement[rank]]
    held, whole, most = 0, _Gathered(shards, weights), (0, 0, 0)
    messages = list(message_bytes(plan, rank, weights, gpus))
    for step, around in zip(plan.actions[rank], map(sum, messages), strict=True):
        if isinstance(step, Upkeep):
            if step.microbatch is not None:
                held += -weights[step.stage].moved if step.op == "OFFLOAD" else weights[step.stage].moved
            most = max(most, (held + around + whole.during(step), held, whole.now))
        for action in step.actions:
            each = weights[action.stage].actions[action.op]
            whole.note(action)
            most = max(most, (held + each.peak + around + whole.now, held, whole.now))
            held += each.left
            if action.op == "F":
                around += weights[action.stage].sent  # after the step
    gradients = sum(each.gradients for each in mine)
    total, activations, gathered = most
    return RankBytes(
        plan.placement[rank],
        sum(each.buffers + shards.of(each.parameters - each.buffers) for each in mine),
        shards.of(gradients),
        int(optimizer * shards.of(gradients)),
        activations,
        total - activations - gathered,
        max((others for _, others, _ in messages), default=0),
        gathered,
    )


class _Gathered:
    """What a rank holds of sharded stages beyond its shards, step by step.

    Gradients are whole from the first W of a stage; what is reduced is kept until the end of the step. Modules are
    gathered into one block of memory each, and copied out of it; likewise gradients are copied into one.

    Attributes:
        now: the bytes.
    """

    def __init__(self, shards: Shards, weights: Sequence[StageWeight]) -> None:
        self.now, self._shards, self._weights = 0, shards, weights
        self._graded: set[int] = set()

    def during(self, step: Upkeep) -> int:
        """The most while a step of upkeep runs; afterwards ``now`` is what is left."""
        each = self._weights[step.stage]
        parameters = each.parameters - each.buffers
        if step.op == "UNSHARD":
            self.now += parameters
        most = self.now + (each.largest if step.op in ("UNSHARD", "REDUCE_GRAD") else 0)
        if step.op == "RESHARD":
            self.now -= parameters
        return most

    def note(self, action: Action) -> None:
        """An action begins."""
        if self._shards.count > 1 and action.op in "WB" and action.stage not in self._graded:
            self._graded.add(action.stage)
            self.now += self._weights[action.stage].gradients
