"""The ways to train a model: each schedule, with none, some and all blocks recomputed, or microbatches offloaded.

What stages take is counted once for each number of stages, and holds for all schedules that place so many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from sternway._bytes import show_bytes
from sternway._tree import leaves, replace_leaves
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline.build._blocks import weigh_again
from sternway.pipeline.build._partition import Layout, lay_out
from sternway.pipeline.build._rank_bytes import RankBytes, Shards
from sternway.pipeline.build._room import Room
from sternway.pipeline.build._shadow import own_or_total
from sternway.pipeline.build._weigh import LargeTensor, StageWeight, largest_of, weigh
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn
from sternway.pipeline.transport._payload import Spec
from sternway.schedule import Costs, Schedule, make, recomputed


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: a schedule, with or without recomputation.

    Attributes:
        schedule: the order of actions, and which stages compute all or some of their blocks again.
        ranks: what each rank holds.
        time: of a step, over that of the same work without idle time and without recomputation.
        moved: the most bytes that a rank offloads in a step. ``time`` is then that of a link which keeps up.
        again: what of the blocks is recomputed, in words.
        kept: the largest tensors that F of one microbatch keeps on the fullest rank.
    """

    schedule: Schedule
    ranks: tuple[RankBytes, ...]
    time: float
    moved: int = 0
    again: str = ""
    kept: tuple[LargeTensor, ...] = ()

    @property
    def peak(self) -> int:
        """The most bytes on any rank."""
        return max(rank.total for rank in self.ranks)

    def __str__(self) -> str:
        moves = f", moving {show_bytes(self.moved)} of a rank" if self.moved else ""
        return self.schedule.name + moves + (f", recomputing {self.again}" if self.again else "")

    @property
    def recompute(self) -> bool:
        """Whether blocks run under activation checkpointing."""
        return bool(self.schedule.recompute)


class WaysToTrain:
    """The ways to train a model without memory, by one microbatch."""

    def __init__(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        loss_fn: LossFn | None,
        kept: float,
        shards: Shards,
        limit: int | None,
        gpus: bool,
    ) -> None:
        self._model, self._microbatch, self._loss_fn = model, microbatch, loss_fn
        self._kept, self._shards, self._limit, self._gpus = kept, shards, limit, gpus
        sample = microbatch.keywords or microbatch.arguments
        self.layout: Layout = lay_out(model, sample, wanted=2)
        self._costs = [
            sum(a.flops for a in each.actions.values()) for each in self._weights(range(len(self.layout.names)))
        ]

    def ways(self, plans: Sequence[Schedule]) -> Iterator[Way]:
        """Ways for each schedule that places as many stages as the model can be cut into."""
        for count in sorted({plan.num_stages for plan in plans}):
            if count > len(self._costs):
                continue
            same = [plan for plan in plans if plan.num_stages == count]
            room = self._room(self.layout.balanced(self._costs, count), same)
            costs = room.costs(_costs(room.weights), 1)
            for plan in same:
                yield from self._ways(room, plan, costs)

    def changes(self, way: Way, n_microbatches: int) -> dict[str, Way]:
        """What twice as many ranks, or half as many rows in twice as many microbatches, make of a way to train."""
        found, whole = dict[str, Way](), self._microbatch
        ranks, name = way.schedule.ranks, way.schedule.name.removesuffix("-offloaded")
        smaller = half(whole)
        todo = [(f"{2 * ranks} ranks", whole, 2 * ranks, n_microbatches)]
        todo += [] if smaller is None else [("half as many rows", smaller, ranks, 2 * n_microbatches)]
        for what, microbatch, many, count in todo:
            self._microbatch = microbatch
            with suppress(ScheduleError, PipelineError):  # that do not exist, or rows that cannot be fewer
                plan = make(name, ranks=many, microbatches=count)
                if plan.num_stages <= len(self._costs):
                    room = self._room(self.layout.balanced(self._costs, plan.num_stages), ())
                    found[what] = self._way(room, _most(room, plan) if way.recompute else plan)
        self._microbatch = whole
        return found

    def _room(self, starts: Sequence[int], plans: Sequence[Schedule]) -> Room:
        """What stages take that begin there, and the bytes that a rank has."""
        weighed = partial(self._weights, starts, list[dict[str, Spec]]())
        plain = weighed()
        again = partial(weigh_again, self._model, self.layout, starts, plain, weighed)
        limit, rate = (0, None) if self._limit is None else (self._limit, math.inf)
        shards, rate = (self._shards, None) if self._shards.count > 1 else (None, rate)
        room = Room(limit, plain, again(), shards, rate, self._kept, self._gpus)
        if self._limit is None or not any(not room.fits(each) and room.fits(_most(room, each)) for each in plans):
            return room
        levels = room.costs(_costs(plain), 1).levels(len(starts))
        return replace(room, again=again(wanted=levels, known=room.again))

    def _ways(self, room: Room, plan: Schedule, costs: Costs) -> Iterator[Way]:
        """A schedule as it is, with blocks recomputed (all, all selectively, and as little as fits), or offloaded."""
        most = _most(room, plan)
        cheap = replace(plan, recompute=room.selective)
        fewest = recomputed(most, costs, fits=room.rank_fits) if self._limit and room.fits(most) else most
        for each in {way.recompute: way for way in (plan, cheap, most, fewest)}.values():
            way = self._way(room, each)
            yield way
            if self._limit is not None and way.peak > self._limit:
                yield from (self._way(room, moved) for moved in room.moved([each], costs) if room.fits(moved))

    def _weights(self, starts: Sequence[int], messages: list[dict[str, Spec]] | None = None) -> list[StageWeight]:
        parts = self.layout.cut(self._model, starts).parts()
        return weigh(parts, self._microbatch, self._loss_fn or own_or_total, messages)

    def _way(self, room: Room, plan: Schedule) -> Way:
        ideal = sum(each.actions[op].flops for each in room.weights for op in ("F", "I", "W"))
        weights = room.chosen(plan)
        moved = [sum(weights[stage].moved for stage, _ in plan.moved(rank)) for rank in range(plan.ranks)]
        # The operations that are done again have been counted. Cheap ones are not, so these are to be added.
        some = plan.shares.items()
        cheap = tuple((stage, 0.0, share.selective) for stage, share in some if share.selective)
        period = replace(plan, recompute=cheap).simulate(_costs(weights)).period
        time = period / (ideal * plan.n_microbatches / plan.ranks)
        ranks = room.ranks(plan)
        fullest = max(ranks, key=lambda rank: rank.total)
        kept = largest_of(each for stage in fullest.stages for each in weights[stage].kept)
        return Way(plan, ranks, time, max(moved), room.recomputes(plan), kept)


def _most(room: Room, plan: Schedule) -> Schedule:
    """A schedule with all blocks recomputed."""
    return replace(plan, recompute=room.everything)


def _costs(weights: Sequence[StageWeight]) -> Costs:
    """Times by which stages are compared: their operations."""
    return Costs(**{op: [float(each.actions[op].flops) for each in weights] for op in "FIWB"})  # type: ignore[index,arg-type]


def half(microbatch: Microbatch) -> Microbatch | None:
    """The first half of a microbatch's rows; None if they cannot be halved."""
    tree = [microbatch.arguments, microbatch.keywords, microbatch.target]
    rows = next((leaf.shape[0] for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), 1)
    if rows % 2:
        return None

    def fewer(leaf: Any) -> Any:
        has = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf[: rows // 2] if has else leaf

    arguments, keywords, target = replace_leaves(fewer, tree)
    return replace(microbatch, arguments=arguments, keywords=keywords, target=target)
