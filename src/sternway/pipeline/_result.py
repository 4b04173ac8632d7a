"""What a step gives back: the loss, the outputs if asked for, and what really ran when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sternway.schedule import Costs, Event, Schedule, Timeline
from sternway.schedule._memory import peak


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of ``Pipeline.step`` or ``Pipeline.evaluate``.

    Attributes:
        loss: the batch's loss, on the rank of the last stage (on every rank, if it was asked for); else None.
        outputs: the last stage's output for each microbatch, on its rank, if they were asked for; else None.
        timeline: what every rank ran and when, on one clock, in the form of a simulated ``Timeline``.
    """

    loss: Tensor | None
    outputs: list[Any] | None
    timeline: Timeline | None


def measured_timeline(schedule: Schedule, times: list[list[tuple[float, float]]], memory_after_i: float) -> Timeline:
    """Times of every rank's actions, on one clock, as a ``Timeline`` that begins at 0."""
    zero = min((rank[0][0] for rank in times if rank), default=0.0)
    events = tuple(
        tuple(
            Event(rank, index, action, start - zero, end - zero)
            for index, (action, (start, end)) in enumerate(zip(schedule.actions[rank], pairs, strict=True))
        )
        for rank, pairs in enumerate(times)
    )
    busy = tuple(sum(event.end - event.start for event in rank) for rank in events)
    spans = tuple(rank[-1].end - rank[0].start if rank else 0.0 for rank in events)
    return Timeline(
        schedule=schedule,
        costs=Costs(memory_after_I=memory_after_i),
        events=events,
        makespan=max((rank[-1].end for rank in events if rank), default=0.0),
        busy=busy,
        idle=tuple(span - used for span, used in zip(spans, busy, strict=True)),
        cost=max(spans),
        bubble_rate=max(0.0, 1 - max(busy) / max(spans)) if max(spans) > 0 else 0.0,
        peaks=tuple(
            peak(steps, stages=max(1, len(stages)), memory_after_i=memory_after_i)
            for steps, stages in zip(schedule.actions, schedule.placement, strict=True)
        ),
        critical_path=(),
        bottlenecks=(),
    )
