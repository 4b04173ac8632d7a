"""The result of a step: the loss, the outputs if they were asked for, and what ran when."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway.pipeline.step._slices import Slices
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.step._times import RankTimes
from sternway.pipeline.transport._later import Rows
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule, Timeline


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """The result of ``Pipeline.step`` or ``Pipeline.evaluate``.

    Attributes:
        loss: the loss of the batch, on the rank of the last stage, or on all with ``loss_everywhere``; else None.
        outputs: the last stage's, on its rank, with ``return_outputs``; else None. Those of ``step`` are a list with
            one for each microbatch; those of ``evaluate`` are joined along the batch.
        nonfinite: where gradients that are not finite came from, if there were some and they were looked for.
        measured: waits for what ``timeline`` returns, if it was recorded.
    """

    loss: Tensor | None
    outputs: Any
    nonfinite: str | None = None
    measured: Callable[[], Timeline] | None = None

    @property
    def timeline(self) -> Timeline | None:
        """What every rank ran and when, on one clock, with ``record``; else None.

        Waits until every rank has run its part. Nothing waits for that before it is asked for.
        """
        return None if self.measured is None else self.measured()

    def __repr__(self) -> str:
        lines = ["StepResult"]
        lines.append(f"  loss      {'not on this rank' if self.loss is None else f'{float(self.loss):.6g}'}")
        if self.outputs is not None:
            many = isinstance(self.outputs, list)
            lines.append(f"  outputs   {f'of {len(self.outputs)} microbatches' if many else 'of the batch'}")
        if (timeline := self.timeline) is not None:
            idle = ", ".join(f"rank {rank} {1e3 * seconds:.2f} ms" for rank, seconds in enumerate(timeline.idle))
            lines.append(
                f"  measured  {timeline.schedule.name}: {1e3 * timeline.makespan:.2f} ms, "
                f"bubble {timeline.bubble_rate:.1%}"
            )
            lines.append(f"  idle      {idle}")
        if self.nonfinite is not None:
            lines.append(f"  nonfinite {self.nonfinite}")
        return "\n".join(lines)


def collect_loss(
    stages: dict[int, Stage],
    schedule: Schedule,
    transport: Transport,
    slices: Slices | None,
    training: bool,
    everywhere: bool,
) -> Tensor | None:
    """The loss of a step, from the last stage; of whole sequences, where each process has a slice."""
    last, loss = schedule.num_stages - 1, None
    if last in stages and stages[last].losses:
        losses = stages[last].losses
        loss = torch.stack([losses[i] for i in sorted(losses)]).sum()
        loss = loss if slices is None else slices.mean(loss)
    if not everywhere or not transport.mine:
        return loss
    told = torch.zeros(2, device=transport.device)  # the loss, and whether there is one
    if loss is not None:
        told = torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float)])
    transport.copy_from(told, schedule.rank_of(last), range(schedule.ranks))
    return told[0] if training or bool(told[1]) else None  # in training there is; to look would wait for a GPU


def gather_timeline(
    schedule: Schedule,
    transport: Transport,
    times: Callable[[], RankTimes],
    offsets: list[float],
    costs: Costs,
    before: Callable[[], RankTimes] | None = None,
) -> Callable[[], Timeline]:
    """A function that waits for the times of every rank, and puts them on the clock of the first.

    ``before`` gives those of the step before in this process, if it is known.
    """
    width, first = max(len(steps) for steps in schedule.actions), schedule.rank_of(0)

    def numbers() -> Rows:
        found, ended = times(), {} if before is None else before()
        return [
            [max(end for _, end in ended[rank]) if ended.get(rank) else math.nan]
            + [number for pair in found[rank] for number in pair]
            + [0.0] * (2 * (width - len(found[rank])))
            for rank in sorted(found)
        ]

    rows = transport.gather_later(numbers)

    @functools.cache
    def timeline() -> Timeline:
        everyone, turn = [], None
        for rank, (ended, *row) in enumerate(rows()):
            used = len(schedule.actions[rank])
            everyone.append([(row[2 * i] - offsets[rank], row[2 * i + 1] - offsets[rank]) for i in range(used)])
            if rank == first and not math.isnan(ended):
                turn = max(0.0, row[0] - ended)
        return Timeline.measured(schedule, everyone, costs=costs, turn=turn)

    return timeline


def first_timeline(
    own: Callable[[], Timeline], transport: Transport, everyone: Sequence[int], costs: Costs
) -> Callable[[], Timeline]:
    """A function that waits for the timeline of the first of several copies of a pipeline, given that of this one.

    Copies decide by it what to run next: what is sharded over them must compute in one order.
    """

    def numbers() -> Rows:
        mine = own()
        turn = math.nan if mine.turn is None else mine.turn
        return [[turn, *(number for rank in mine.events for event in rank for number in (event.start, event.end))]]

    rows = transport.gather_later(numbers, everyone)

    def timeline() -> Timeline:
        numbers, schedule = iter(rows()[0]), own().schedule
        turn = next(numbers)
        spans = [[(next(numbers), next(numbers)) for _ in steps] for steps in schedule.actions]
        return Timeline.measured(schedule, spans, costs=costs, turn=None if math.isnan(turn) else turn)

    return timeline
