"""Plans within a number of bytes: what each rank holds under a plan is counted, as by ``fit``, not guessed.

A search is given what each stage keeps, as it is and if its blocks are recomputed, and what each rank has left for
that: its bytes, less parameters, gradients, the optimizer's state, messages, and what an action takes while it runs.
Where there is a link to other memory, plans that move microbatches over it take part. What is found is counted once
more, action by action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from sternway._bytes import show_bytes
from sternway._torch.memory import without_memory
from sternway._tree import replace_leaves
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline.build._blocks import Levels, counted, weigh_again
from sternway.pipeline.build._partition import Layout, arguments_of
from sternway.pipeline.build._rank_bytes import KINDS, OPTIMIZERS, RankBytes, Shards, bytes_of_rank, rank_bytes
from sternway.pipeline.build._shadow import blank, own_or_total, shadow
from sternway.pipeline.build._weigh import StageWeight, weigh
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn
from sternway.pipeline.transport._payload import Spec
from sternway.schedule import Costs, Schedule, Share, fuse, make, names, offloaded, recomputed, sharded


@dataclass(frozen=True, slots=True)
class Room:
    """The bytes that a rank has, and what the stages take, for one way to cut the model.

    Attributes:
        limit: the bytes of a rank.
        weights: what each stage takes.
        again: what each takes if blocks are recomputed that the model repeats, for some numbers of them.
        shards: how parameters are sharded; None if they are not.
        rate: the bytes in a unit of time of a link over which microbatches may be offloaded; None if none may be.
        optimizer: how many times the bytes that it trains an optimizer keeps.
        gpus: whether ranks are GPUs, whose messages take less.
    """

    limit: int
    weights: list[StageWeight]
    again: Levels
    shards: Shards | None = None
    rate: float | None = None
    optimizer: float = OPTIMIZERS["adamw"]
    gpus: bool = False

    def ranks(self, plan: Schedule) -> tuple[RankBytes, ...]:
        """What each rank holds under a plan when it holds most."""
        return rank_bytes(plan, self.chosen(plan), self.optimizer, self.shards, self.gpus)

    def chosen(self, plan: Schedule) -> list[StageWeight]:
        """What each stage takes under a plan."""
        found = list(self.weights)
        for stage, share in plan.shares.items():
            counts = self.again[stage]
            found[stage] = counts[counted(share, max(counts)[0])] if counts else found[stage]
        return found

    @property
    def everything(self) -> tuple[int, ...]:
        """The stages with blocks that can be recomputed."""
        return tuple(stage for stage, counts in enumerate(self.again) if counts)

    def in_words(self, plan: Schedule) -> str:
        """A plan's name, and what of the blocks it recomputes."""
        again = self.recomputes(plan)
        return plan.name + (f", recomputing {again}" if again else "")

    def recomputes(self, plan: Schedule) -> str:
        """What of the blocks a plan recomputes; nothing if it recomputes none."""
        blocks = self._blocks()
        counts = [counted(share, blocks[stage]) for stage, share in plan.shares.items() if blocks[stage]]
        words = []
        for some, how in zip(map(sum, zip(*counts, strict=True)), ("", " selectively"), strict=False):
            whole = "blocks" if some == sum(blocks) else f"{some} of {sum(blocks)} blocks"
            words += [whole + how] if some else []
        return " and ".join(words)

    @property
    def selective(self) -> tuple[tuple[int, float, float], ...]:
        """The stages of which all blocks can be recomputed selectively, and then keep less."""
        found = []
        for stage in self.everything:
            some = self.again[stage].get((0, self._blocks()[stage]))
            if some is not None and some.actions["F"].left < self.weights[stage].actions["F"].left:
                found.append((stage, 0.0, 1.0))
        return tuple(found)

    def _blocks(self) -> list[int]:
        """How many blocks of each stage can be recomputed."""
        return [max(counts, default=(0, 0))[0] for counts in self.again]

    def nearest(self, plan: Schedule, costs: Costs) -> Schedule | None:
        """The fastest named schedule of as many stages that fits, with as little recomputed as that takes."""
        others = (each for each in _named(plan, anywhere=True) if each.name != plan.name)
        fitting = [each for each in (self._fewest(other, costs) for other in others) if self.fits(each)]
        return min(fitting, key=lambda each: cost_of(self.upkept(each), costs), default=None)

    def rank_fits(self, plan: Schedule, rank: int) -> bool:
        """Whether one rank holds no more than it has."""
        held = bytes_of_rank(plan, rank, self.chosen(plan), self.optimizer, self.shards, self.gpus)
        return held.total <= self.limit

    def upkept(self, plan: Schedule) -> Schedule:
        """A plan with the upkeep that is counted."""
        return plan if self.shards is None else sharded(plan, gathered=self.shards.gathered)

    def peak(self, plan: Schedule) -> int:
        """The most bytes on any rank."""
        return max(rank.total for rank in self.ranks(plan))

    def fits(self, plan: Schedule) -> bool:
        """Whether no rank holds more than it has."""
        return self.peak(plan) <= self.limit

    def costs(self, plain: Costs, ranks: int) -> Costs:
        """The costs with what these stages keep; the unit of memory is what F keeps on a rank, on average."""
        unit = max(1.0, sum(each.actions["F"].left for each in self.weights) / ranks)

        def units(sizes: Iterable[int]) -> list[float]:
            return [max(0, size) / unit for size in sizes]

        after_f = [each.actions["F"].left for each in self.weights]
        after_i = [each.actions["F"].left + each.actions["I"].left for each in self.weights]
        costs = replace(plain, activation_bytes=unit, memory_after_F=units(after_f), memory_after_I=units(after_i))
        if self.rate is not None:
            stays = units(each.actions["F"].left - each.moved for each in self.weights)
            costs = replace(costs, offload=[each.moved / self.rate for each in self.weights], memory_offloaded=stays)
        most = [counts[max(counts)] if counts else own for counts, own in zip(self.again, self.weights, strict=True)]
        inputs = [each.actions["F"].left for each in most]
        backward = [each.actions["B"].peak for each in most]
        beyond = [max(0, peak - _working(each)) for peak, each in zip(backward, self.weights, strict=True)]
        whole = [sum(both) for both in zip(inputs, beyond, strict=True)]
        costs = replace(costs, memory_input=units(inputs), memory_again=units(whole), blocks=self._blocks())
        if any(counts and (0, max(counts)[0]) not in counts for counts in self.again):
            return costs
        some = [
            counts[0, max(counts)[0]] if counts else own for counts, own in zip(self.again, self.weights, strict=True)
        ]
        return replace(costs, memory_selective=units(each.actions["F"].left for each in some))

    def limits(self, plan: Schedule, costs: Costs) -> list[float]:
        """What each rank of a plan has left for what its stages keep, in units of these costs."""
        found = []
        for rank, stages in zip(self.ranks(plan), plan.placement, strict=True):
            anyway = rank.parameters + rank.gradients + rank.optimizer + rank.gathered + rank.messages
            working = max(_working(self.weights[stage]) for stage in stages)
            found.append(max(0, self.limit - anyway - working) / costs.activation_bytes)
        return found

    def best(self, find: Find, most: float, costs: Costs) -> tuple[Schedule, Limit]:
        """The fastest plan that stays within the bytes, searched or named, and its limit in units of memory.

        If there is none, the smallest plan.
        """
        ample = find(most, ())
        limits = [min(most, limit) for limit in self.limits(ample, costs)]
        plans = [ample]
        if not self.fits(ample):
            try:
                plans.append(self._found(find, limits, costs))
                if not self.fits(plans[-1]):  # by a few messages, which the limits do not know
                    plans.append(self._found(find, self._tighter(plans[-1], limits, costs), costs))
            except ScheduleError:  # not even one microbatch, by this count, which is a little too high
                limits = [most] * len(limits)
            named = [each for plan in _named(ample) for each in (plan, self._fewest(plan, costs))]
            ways = [*named, ample, self._fewest(ample, costs)]
            plans += [*named, *self.moved((fuse(plan, costs) for plan in ways), costs)]
        best = self._best([each for plan in plans for each in (fuse(plan, costs), plan)], costs)
        peaks = best.simulate(costs).peaks
        return best, [max(both) for both in zip(limits, peaks, strict=True)]

    def _found(self, find: Find, limits: Sequence[float], costs: Costs) -> Schedule:
        """What a search finds within the limits, of which no more is recomputed than its bytes ask for."""
        return recomputed(find(limits, "auto" if any(self.again) else ()), costs, fits=self.rank_fits)

    def _tighter(self, plan: Schedule, limits: Sequence[float], costs: Costs) -> list[float]:
        """The limits, less what each rank of a plan has too much."""
        over = (max(0, rank.total - self.limit) / costs.activation_bytes for rank in self.ranks(plan))
        return [limit - each for limit, each in zip(limits, over, strict=True)]

    def _best(self, plans: Sequence[Schedule], costs: Costs) -> Schedule:
        """The fastest that stays within the bytes; if none does, the smallest."""
        fitting = [plan for plan in plans if self.fits(plan)]
        return (
            min(fitting, key=lambda plan: cost_of(self.upkept(plan), costs)) if fitting else min(plans, key=self.peak)
        )

    def moved(self, plans: Iterable[Schedule], costs: Costs) -> Iterator[Schedule]:
        """These plans with as many microbatches offloaded as make them fit; if that is not enough, with all."""
        for plan in plans if self.rate is not None else ():
            try:
                made = offloaded(plan, costs, memory_limit=self.limits(plan, costs))
            except ScheduleError:
                made = offloaded(plan, costs, memory_limit=None)
            yield replace(made, name=f"{made.name}-offloaded")

    def lightest(self, plan: Schedule, costs: Costs) -> Schedule:
        """A given order of actions with as little recomputed as fits, or microbatches offloaded if that is faster.

        If neither makes it fit, the smallest. What the plan itself recomputes or offloads is left as it is.
        """
        if self.fits(plan) or plan.recompute or any(plan.moved(rank) for rank in range(plan.ranks)):
            return plan
        again = self._fewest(plan, costs)
        return self._best([again, *self.moved({plan.recompute: plan, again.recompute: again}.values(), costs)], costs)

    def _fewest(self, plan: Schedule, costs: Costs) -> Schedule:
        """The plan with as little recomputed as fits; with all blocks of ranks that even then do not fit."""
        return recomputed(replace(plan, recompute=self.everything), costs, fits=self.rank_fits)


Limit = float | Sequence[float]
Recompute = Sequence[int] | Literal["auto"]
Find = Callable[[Limit, Recompute], Schedule]
"""Searches within a limit of memory, with these stages recomputed."""


def _named(like: Schedule, *, anywhere: bool = False) -> Iterator[Schedule]:
    """The named schedules that place as many stages, in the same way or, with ``anywhere``, in another."""
    for name in names():
        try:
            made = make(name, ranks=like.ranks, microbatches=like.n_microbatches)
        except ScheduleError:  # it does not exist for these numbers
            continue
        if made.placement == like.placement or (anywhere and made.num_stages == like.num_stages):
            yield made


def cost_of(plan: Schedule, costs: Costs) -> tuple[float, float]:
    """The time of a step among others, and that of one alone."""
    timeline = plan.simulate(costs)
    return timeline.period, timeline.makespan


def _working(weight: StageWeight) -> int:
    """The most that an action of a stage takes while it runs, beyond what was there and what it leaves."""
    return max(each.peak - max(0, each.left) for each in weight.actions.values())


def rooms(
    model: nn.Module,
    layout: Layout,
    ways: Sequence[Sequence[int]],
    limit: int,
    sample: Any,
    target: Any,
    loss_fn: LossFn | None,
    shards: Shards | None = None,
    rate: float | None = None,
    asked: Mapping[int, Share] | None = None,
    costs_of: Sequence[Costs] | None = None,
    gpus: bool = False,
) -> list[Room]:
    """For each way to cut the model, the room of its stages.

    ``asked`` are shares that a schedule recomputes, and ``costs_of`` what stages cost, by which others are chosen.
    """
    with without_memory():
        made = shadow(model)
        arguments, keywords = arguments_of(replace_leaves(blank, sample))
        microbatch = Microbatch(arguments, keywords, target=0 if target is None else replace_leaves(blank, target))
        loss = loss_fn if loss_fn is not None and target is not None else own_or_total

        found = []
        for number, way in enumerate(ways):
            weighed = partial(_weighed, made, layout, way, microbatch, loss, list[dict[str, Spec]]())
            plain = weighed()
            again = partial(weigh_again, made, layout, way, plain, weighed)
            room = Room(limit, plain, again(), shards, rate, gpus=gpus)
            levels = room.costs(Costs() if costs_of is None else costs_of[number], 1).levels(len(way))
            extra = {stage: (share,) for stage, share in (asked or {}).items()}
            wanted = [(*shares, *extra.get(stage, ())) for stage, shares in enumerate(levels)]
            found.append(replace(room, again=again(wanted=wanted, known=room.again)))
    return found


def _weighed(
    model: nn.Module,
    layout: Layout,
    starts: Sequence[int],
    microbatch: Microbatch,
    loss_fn: LossFn,
    messages: list[dict[str, Spec]],
) -> list[StageWeight]:
    return weigh(layout.cut(model, starts).parts(), microbatch, loss_fn, messages)


def no_room(room: Room, plan: Schedule, costs: Costs) -> PipelineError:
    """The error if nothing fits: what the smallest plan needs, and of what; and the nearest one that fits."""
    limit, smallest, name = room.limit, room.ranks(plan), room.in_words(plan)
    rank = max(range(len(smallest)), key=lambda index: smallest[index].total)
    fullest = smallest[rank]
    parts = ", ".join(f"{kind} {show_bytes(getattr(fullest, kind))}" for kind in KINDS if getattr(fullest, kind))
    most = max(KINDS, key=lambda kind: int(getattr(fullest, kind)))
    fix = "use smaller microbatches" if most in ("activations", "working") else "use more ranks"
    if (near := room.nearest(plan, costs)) is not None:
        again = f", recomputing {room.recomputes(near)}" if near.recompute else ""
        fix = f'pass schedule="{near.name}", which needs {show_bytes(room.peak(near))}{again}'
    return PipelineError(
        f"the pipeline must fit into memory={show_bytes(limit)} on every rank",
        got=f"{show_bytes(fullest.total)} on rank {rank} under {name}: {parts}",
        fix=f"{fix}, or pass at least memory={fullest.total}",
    )
