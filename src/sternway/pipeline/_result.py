"""What a step gives back: the loss, the outputs if asked for, and what really ran when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway.pipeline._stage import Stage
from sternway.pipeline._transport import Transport
from sternway.schedule import Schedule, Timeline


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of ``Pipeline.step`` or ``Pipeline.evaluate``.

    Attributes:
        loss: the batch's loss, on the rank of the last stage (on every rank, if it was asked for); else None.
        outputs: the last stage's output for each microbatch, on its rank, if they were asked for; else None.
        timeline: what every rank ran and when, on one clock, in the form of a simulated ``Timeline``.
        nonfinite: where gradients that are not finite came from, if they were looked for and there were some.
    """

    loss: Tensor | None
    outputs: list[Any] | None
    timeline: Timeline | None
    nonfinite: str | None = None


def collect(
    stages: dict[int, Stage], schedule: Schedule, transport: Transport, everywhere: bool, with_outputs: bool
) -> tuple[Tensor | None, list[Any] | None]:
    """A step's loss and outputs, from where the last stage is."""
    last = schedule.num_stages - 1
    loss, outputs = None, None
    if last in stages:
        stage = stages[last]
        if stage.losses:
            loss = torch.stack([stage.losses[i] for i in sorted(stage.losses)]).sum()
        if with_outputs:
            outputs = [stage.outputs[i] for i in sorted(stage.outputs)]
    if everywhere:
        rows = transport.gather([[0.0 if loss is None else float(loss)]])
        loss = torch.tensor(rows[schedule.rank_of(last) if len(rows) > 1 else 0][0])
    return loss, outputs


def gather_timeline(
    schedule: Schedule,
    transport: Transport,
    times: dict[int, list[tuple[float, float]]],
    offsets: list[float],
    memory_after_i: float,
) -> Timeline:
    """Every rank's times, on the first one's clock."""
    width = max(len(steps) for steps in schedule.actions)
    rows = [
        [number for pair in times[rank] for number in pair] + [0.0] * (2 * (width - len(times[rank])))
        for rank in sorted(times)
    ]
    everyone = []
    for rank, row in enumerate(transport.gather(rows)):
        used = len(schedule.actions[rank])
        everyone.append([(row[2 * i] - offsets[rank], row[2 * i + 1] - offsets[rank]) for i in range(used)])
    return Timeline.measured(schedule, everyone, memory_after_i)
