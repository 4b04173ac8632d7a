"""Will it fit? The memory of each rank, before anything is launched: no GPU, no weights, no data.

The model runs once on tensors without memory, which know their shapes alone (``_weigh.py``). A rank holds its
parameters, their gradients, the optimizer's state, and what the schedule's order of actions keeps of activations; the
most is reached while some action runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sternway import schedule as schedules
from sternway._bytes import parse_bytes, show_bytes
from sternway._torch import require
from sternway._torch.memory import without_memory
from sternway._tree import replace_leaves
from sternway.errors import PipelineError, ScheduleError, SternwayError
from sternway.pipeline.build._blocks import weigh_again
from sternway.pipeline.build._partition import Layout, arguments_of, lay_out
from sternway.pipeline.build._rank_bytes import KINDS, OPTIMIZERS, RankBytes, Shards
from sternway.pipeline.build._request import check_copies
from sternway.pipeline.build._room import Room
from sternway.pipeline.build._shadow import blank, own_or_total, shadow
from sternway.pipeline.build._weigh import StageWeight, weigh
from sternway.pipeline.forward._record import sample_runs
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import LossFn
from sternway.schedule import Costs, Schedule, recomputed


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: a schedule, with or without recomputation.

    Attributes:
        schedule: the order of actions, and which stages compute all or some of their blocks again.
        ranks: what each rank holds.
        time: of a step, over that of the same work without idle time and without recomputation.
        moved: the most bytes that a rank offloads in a step. ``time`` is then that of a link which keeps up.
        again: what of the blocks is recomputed, in words.
    """

    schedule: Schedule
    ranks: tuple[RankBytes, ...]
    time: float
    moved: int = 0
    again: str = ""

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


@dataclass(frozen=True, slots=True)
class Fit:
    """What ``fit`` found.

    Attributes:
        ways: the ways to train, the fastest first.
        limit: the bytes that a rank has; None if no limit was given.
        parameters: how many numbers the model's parameters hold.
    """

    ways: tuple[Way, ...]
    limit: int | None
    parameters: int

    @property
    def best(self) -> Way | None:
        """The fastest way that fits; None if none does. One that offloads counts only if no other fits."""
        return min((way for way in self.ways if self.fits(way)), key=lambda way: way.moved > 0, default=None)

    def fits(self, way: Way) -> bool:
        """Whether no rank needs more than there is."""
        return self.limit is None or way.peak <= self.limit

    @property
    def verdict(self) -> str:
        """One sentence: the fastest way that fits, or what the smallest one lacks."""
        best = self.best
        if best is not None:
            of = "" if self.limit is None else f" of {show_bytes(self.limit)}"
            return f"It fits: {best} needs {show_bytes(best.peak)}{of} on the fullest rank." + self._faster(best)
        smallest = min(self.ways, key=lambda way: way.peak)
        rank = max(smallest.ranks, key=lambda rank: rank.total)
        kinds = {name: getattr(rank, name) for name in KINDS}
        largest = max(kinds, key=lambda name: kinds[name])
        return (
            f"It does not fit: the smallest way, {smallest}, needs {show_bytes(smallest.peak)} of "
            f"{show_bytes(self.limit or 0)}, most of it for {largest} ({show_bytes(kinds[largest])}). "
            + ("Use smaller microbatches." if largest in ("activations", "working") else "Use more ranks or shards.")
        )

    def _faster(self, best: Way) -> str:
        """What offloading would change, if that is faster."""
        way = next((way for way in self.ways if way.moved and self.fits(way) and way.time < best.time), None)
        if way is None or best.moved:
            return ""
        return f" With offload, {way} takes {way.time / best.time:.0%} of its time, if the link keeps up."

    def __repr__(self) -> str:
        rows = [("schedule", "fullest rank", "time", "")]
        rows += [
            (str(way), show_bytes(way.peak), f"{way.time:.2f}", "" if self.fits(way) else "too large")
            for way in self.ways
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.verdict, *(f"  {line}" for line in lines)])


def fit(
    model: nn.Module | Callable[[], Any],
    sample: Any = None,
    *,
    ranks: int,
    n_microbatches: int,
    memory: int | str | None = None,
    schedule: str | None = None,
    loss_fn: LossFn | None = None,
    target: Any = None,
    optimizer: str = "adamw",
    shards: int = 1,
    gathered: int | None = None,
) -> Fit:
    """Say how much memory each rank of a pipeline will need, without any of it.

    Not counted: what CUDA and NCCL take for themselves, gaps between blocks of memory, and what the optimizer's step
    takes for a moment.

    Args:
        model: the model, which may be on the meta device; or a function that returns it, or it and a sample. The
            function is called under ``torch.device("meta")``, so that no weights are made.
        sample: one microbatch: a tensor, a tuple of arguments, or a dict of keyword arguments. Its values do not
            matter.
        ranks: the number of ranks.
        n_microbatches: how many microbatches a step has.
        memory: what each rank has: bytes, or text such as "80GB". Schedules that need more are also counted with as few
            blocks recomputed, and with as many microbatches offloaded, as make them fit.
        schedule: the name of a schedule; all are tried by default.
        loss_fn: the loss at the end; by default the model's own, or the sum of its output.
        target: the target of the loss.
        optimizer: "adamw", "adam", "momentum", "sgd" or "none": how much it keeps for each parameter.
        shards: over how many processes ``fully_shard`` shards the modules of each stage, all of them. They are counted
            as gathered and reduced in the dtype of the parameters.
        gathered: how many stages a rank keeps gathered at once, as for ``Pipeline``.

    Raises:
        PipelineError: if the sample does not go through the model, or the model cannot be cut into so many stages.
    """
    require("pipeline.fit")
    limit = None if memory is None else parse_bytes(memory, "memory", PipelineError)
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise PipelineError(
            "optimizer must be one that is known", got=repr(optimizer), fix=f"pass one of {[*OPTIMIZERS]}"
        )
    for name, count in (("shards", shards), ("gathered", 1 if gathered is None else gathered)):
        PipelineError.unless(
            type(count) is int and count >= 1, f"{name} must be a number from 1 on", count, "pass 1 or more"
        )
    names = schedules.names() if schedule is None else (schedule,)
    check_copies(names[0])
    plans = list(_plans(names, ranks, n_microbatches))
    if not plans:
        raise PipelineError(
            "some schedule must be possible",
            got=f"{ranks} ranks, {n_microbatches} microbatches",
            fix="use more of both",
        )
    if not isinstance(model, nn.Module):
        model, sample = _called(model, sample)
    with without_memory():
        made = shadow(model)
        arguments, keywords = arguments_of(replace_leaves(blank, sample))
        microbatch = Microbatch(arguments, keywords, target=0 if target is None else replace_leaves(blank, target))
        with sample_runs():
            problem = _Problem(made, microbatch, loss_fn, OPTIMIZERS[optimizer], Shards(shards, gathered), limit)
            ways = list(problem.ways(plans))
        numbers = sum(parameter.numel() for parameter in made.parameters())
    if not ways:
        raise PipelineError(
            f"the model must have at least {ranks} pieces that can be cut apart",
            got=f"{len(problem.layout.points)}",
            fix="use fewer ranks",
        )
    return Fit(tuple(sorted(ways, key=lambda way: way.time)), limit, numbers)


def _plans(names: Sequence[str], ranks: int, microbatches: int) -> Iterator[Schedule]:
    for name in names:
        try:
            yield schedules.make(name, ranks=ranks, microbatches=microbatches)
        except ScheduleError:
            if len(names) == 1:
                raise


def _called(build: Callable[[], Any], sample: Any) -> tuple[nn.Module, Any]:
    """The model that a function makes, and the sample, if it makes that, too."""
    PipelineError.unless(callable(build), "model must be an nn.Module, or a function that makes one", build, "pass one")
    try:
        with torch.device("meta"):
            made = build()
    except SternwayError:
        raise
    except Exception as error:
        raise PipelineError(
            'the function must run under torch.device("meta")',
            got=f"{type(error).__name__}: {error}",
            fix="make a model and a sample there, and read no values",
        ) from error
    model, *rest = made if isinstance(made, tuple) and made else (made,)
    if len(rest) == 1 and sample is None:
        sample = rest.pop()
    if not isinstance(model, nn.Module) or rest or sample is None:
        raise PipelineError(
            "the function must return a model and a sample",
            got=f"{type(made).__name__}{', and no sample' if isinstance(made, nn.Module) else ''}",
            fix="return model, sample",
        )
    return model, sample


class _Problem:
    """A model without memory, and one microbatch."""

    def __init__(
        self,
        model: nn.Module,
        microbatch: Microbatch,
        loss_fn: LossFn | None,
        kept: float,
        shards: Shards,
        limit: int | None,
    ) -> None:
        self._model, self._microbatch, self._loss_fn = model, microbatch, loss_fn
        self._kept, self._shards, self._limit = kept, shards, limit
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

    def _room(self, starts: Sequence[int], plans: Sequence[Schedule]) -> Room:
        """What stages take that begin there, and the bytes that a rank has."""
        plain, weighed = self._weights(starts), partial(self._weights, starts)
        again = partial(weigh_again, self._model, self.layout, starts, plain, weighed)
        limit, rate = (0, None) if self._limit is None else (self._limit, math.inf)
        shards, rate = (self._shards, None) if self._shards.count > 1 else (None, rate)
        room = Room(limit, plain, again(some=False), shards, rate, self._kept)
        if self._limit is None or not any(not room.fits(each) and room.fits(_most(room, each)) for each in plans):
            return room
        return replace(room, again=again(known=room.again))

    def _ways(self, room: Room, plan: Schedule, costs: Costs) -> Iterator[Way]:
        """A schedule as it is, with all blocks recomputed and with as few as fit, and with microbatches offloaded."""
        most = _most(room, plan)
        fewest = recomputed(most, costs, fits=room.rank_fits) if self._limit and room.fits(most) else most
        for each in {way.recompute: way for way in (plan, most, fewest)}.values():
            way = self._way(room, each)
            yield way
            if self._limit is not None and way.peak > self._limit:
                yield from (self._way(room, moved) for moved in room.moved([each], costs) if room.fits(moved))

    def _weights(self, starts: Sequence[int]) -> list[StageWeight]:
        return weigh(self.layout.cut(self._model, starts).parts(), self._microbatch, self._loss_fn or own_or_total)

    def _way(self, room: Room, plan: Schedule) -> Way:
        ideal = sum(each.actions[op].flops for each in room.weights for op in ("F", "I", "W"))
        weights = room.chosen(plan)
        moved = [sum(weights[stage].moved for stage, _ in plan.moved(rank)) for rank in range(plan.ranks)]
        # The operations that are done again have been counted, so nothing is to be added for them.
        period = replace(plan, recompute=()).simulate(_costs(weights)).period
        time = period / (ideal * plan.n_microbatches / plan.ranks)
        return Way(plan, room.ranks(plan), time, max(moved), room.recomputes(plan))


def _most(room: Room, plan: Schedule) -> Schedule:
    """A schedule with all blocks recomputed."""
    return replace(plan, recompute=room.everything)


def _costs(weights: Sequence[StageWeight]) -> Costs:
    """Times by which stages are compared: their operations."""
    return Costs(**{op: [float(each.actions[op].flops) for each in weights] for op in "FIWB"})  # type: ignore[index,arg-type]
