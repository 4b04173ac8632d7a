"""What each rank holds when it holds most, given what stages take and the order of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sternway.pipeline.build._weigh import StageWeight
from sternway.schedule import Schedule, Upkeep

OPTIMIZERS = {"none": 0.0, "sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0}
"""How many times the bytes of the parameters that it trains an optimizer keeps."""

_MESSAGES = 6  # on their way to and from a rank: asked for ahead, being read, not yet sent


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank holds when it holds most.

    Attributes:
        stages: the stages of the rank.
        parameters: parameters and buffers.
        gradients: of the parameters.
        optimizer: the optimizer's state.
        activations: what F and I keep for later.
        working: what the action that runs then takes beyond that, and messages.
        messages: of that, messages.
    """

    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    messages: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


def rank_bytes(plan: Schedule, weights: Sequence[StageWeight], optimizer: float) -> tuple[RankBytes, ...]:
    """What each rank of a plan holds, if an optimizer keeps so many times the bytes that it trains."""
    return tuple(_of_rank(plan, rank, weights, optimizer) for rank in range(plan.ranks))


def _of_rank(plan: Schedule, rank: int, weights: Sequence[StageWeight], optimizer: float) -> RankBytes:
    mine = [weights[stage] for stage in plan.placement[rank]]
    held, most = 0, (0, 0)
    for step in plan.actions[rank]:
        if isinstance(step, Upkeep) and step.microbatch is not None:
            kept = weights[step.stage].actions["F"].left
            held += -kept if step.op == "OFFLOAD" else kept
            most = max(most, (held, held))
        for action in step.actions:
            each = weights[action.stage].actions[action.op]
            most = max(most, (held + each.peak, held))
            held += each.left
    gradients = sum(each.gradients for each in mine)
    messages = _MESSAGES * max(each.message for each in mine)
    return RankBytes(
        plan.placement[rank],
        sum(each.parameters for each in mine),
        gradients,
        int(optimizer * gradients),
        most[1],
        most[0] - most[1] + messages,
        messages,
    )
