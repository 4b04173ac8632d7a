"""Plans within a number of bytes: what each rank holds under a plan is counted, as by ``fit``, not guessed.

A search takes its limit in microbatches. Here the largest such limit is found with which the plan stays within the
bytes of every rank, for blocks that keep their activations and for blocks that compute them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sternway._bytes import show_bytes
from sternway._torch.memory import without_memory
from sternway._tree import replace_leaves
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline.build._partition import Layout, arguments_of
from sternway.pipeline.build._rank_bytes import KINDS, OPTIMIZERS, RankBytes, Shards, rank_bytes
from sternway.pipeline.build._shadow import blank, own_or_total, recompute_blocks, shadow
from sternway.pipeline.build._weigh import StageWeight, weigh
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn
from sternway.schedule import Costs, Schedule, candidates

_TRIES = 16  # limits between nothing and the largest
_MANY = 100  # plans: all of them
_OPTIMIZER = OPTIMIZERS["adamw"]


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that a rank has, and what the stages take, for one way to cut the model.

    Attributes:
        limit: the bytes of a rank.
        weights: what each stage takes.
        recompute: whether repeated blocks run under activation checkpointing.
        shards: how parameters are sharded; None if they are not.
    """

    limit: int
    weights: list[StageWeight]
    recompute: bool
    shards: Shards | None = None

    def ranks(self, plan: Schedule) -> tuple[RankBytes, ...]:
        """What each rank holds under a plan when it holds most."""
        return rank_bytes(plan, self.weights, _OPTIMIZER, self.shards)

    def peak(self, plan: Schedule) -> int:
        """The most bytes on any rank."""
        return max(rank.total for rank in self.ranks(plan))

    def fits(self, plan: Schedule) -> bool:
        """Whether no rank holds more than it has."""
        return self.peak(plan) <= self.limit

    def costs(self, plain: Costs) -> Costs:
        """The costs of these stages, given those of stages that keep their activations."""
        kept = sum(each.actions["F"].left for each in self.weights)
        after = kept + sum(each.actions["I"].left for each in self.weights)
        ratio = max(0.0, after / kept) if kept > 0 else 1.0
        if not self.recompute:
            return replace(plain, memory_after_I=ratio)
        whole = None if plain.B is None else _plus(plain.B, plain.F)
        return replace(plain, I=_plus(plain.I, plain.F), B=whole, memory_after_I=ratio)

    def best(self, find: Callable[[float], Schedule], most: float, costs: Costs) -> tuple[Schedule, float]:
        """The fastest plan that stays within the bytes, searched or named, and its limit in microbatches.

        If there is none, the smallest plan.
        """
        plan, limit = self._largest(find, most)
        plans = candidates(plan, costs, memory_limit=most, count=_MANY)
        fastest = next((each for each in plans if self.fits(each)), None)
        plan = fastest or min([plan, *plans], key=self.peak)
        return plan, max(limit, plan.simulate(costs).peak_memory)

    def _largest(self, find: Callable[[float], Schedule], most: float) -> tuple[Schedule, float]:
        """The plan with the largest limit in microbatches that stays within the bytes, and that limit.

        If there is none, the smallest plan.
        """
        best = find(most), most
        if self.fits(best[0]):
            return best
        low, high = 1, _TRIES - 1
        while low <= high:
            middle = (low + high) // 2
            limit = most * middle / _TRIES
            try:
                plan = find(limit)
            except ScheduleError:  # not even one microbatch
                low = middle + 1
                continue
            if self.fits(plan) or not self.fits(best[0]):
                best = plan, limit
            low, high = (middle + 1, high) if self.fits(plan) else (low, middle - 1)
        return best


def _plus(times: float | Sequence[float], more: float | Sequence[float]) -> float | list[float]:
    if isinstance(times, Sequence) and isinstance(more, Sequence):
        return [time + other for time, other in zip(times, more, strict=True)]
    assert isinstance(times, float), "one number, or one for each stage"
    assert isinstance(more, float)
    return times + more


def rooms(
    model: nn.Module,
    layout: Layout,
    ways: Sequence[Sequence[int]],
    limit: int,
    sample: Any,
    target: Any,
    loss_fn: LossFn | None,
    shards: Shards | None = None,
) -> list[list[Room]]:
    """For each way to cut the model: the room of its stages as they are, and, if blocks repeat, with recomputation."""
    with without_memory():
        made = shadow(model)
        arguments, keywords = arguments_of(replace_leaves(blank, sample))
        microbatch = Microbatch(arguments, keywords, target=0 if target is None else replace_leaves(blank, target))
        loss = loss_fn if loss_fn is not None and target is not None else own_or_total

        def weighed(recompute: bool) -> list[Room]:
            parts = (layout.cut(made, way).parts() for way in ways)
            return [Room(limit, weigh(each, microbatch, loss), recompute, shards) for each in parts]

        found = [weighed(False)]
        if recompute_blocks(made, layout, randomly=False):
            found.append(weighed(True))
    return [list(each) for each in zip(*found, strict=True)]


def no_room(limit: int, smallest: tuple[RankBytes, ...], name: str) -> PipelineError:
    """The error if nothing fits: what the smallest plan needs, and of what."""
    rank = max(range(len(smallest)), key=lambda index: smallest[index].total)
    fullest = smallest[rank]
    parts = ", ".join(f"{kind} {show_bytes(getattr(fullest, kind))}" for kind in KINDS if getattr(fullest, kind))
    most = max(KINDS, key=lambda kind: int(getattr(fullest, kind)))
    fix = "use smaller microbatches" if most in ("activations", "working") else "use more ranks"
    return PipelineError(
        f"the pipeline must fit into memory={show_bytes(limit)} on every rank",
        got=f"{show_bytes(fullest.total)} on rank {rank} under {name}: {parts}",
        fix=f"{fix}, or pass at least memory={fullest.total}",
    )
