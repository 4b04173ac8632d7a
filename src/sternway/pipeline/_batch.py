"""A batch as microbatches, as far as a process's stages need it."""

from __future__ import annotations

from typing import Any

from sternway.errors import PipelineError
from sternway.pipeline._microbatch import ChunkSpec, cut, weights
from sternway.pipeline._stage import Microbatch, Stage
from sternway.schedule import Schedule


def cut_batch(
    stages: dict[int, Stage],
    schedule: Schedule,
    chunk: ChunkSpec,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    target: Any,
    stage_kwargs: dict[str, Any] | None,
    training: bool,
) -> list[Microbatch]:
    """One ``Microbatch`` for each of the schedule's.

    Raises:
        PipelineError: no inputs where the first stage is, no loss or target where the last one is, or too few rows.
    """
    count, last = schedule.n_microbatches, schedule.num_stages - 1
    has_loss = last in stages and stages[last].loss_fn is not None
    if training and last in stages and (not has_loss or target is None):
        raise PipelineError(
            "the last stage's rank trains with a loss and a target",
            got="no loss" if not has_loss else "no target",
            fix="pass loss_fn= to Pipeline and target= to step, at least on that rank",
        )
    if 0 in stages and not inputs and not keywords:
        raise PipelineError("the first stage's rank is given the batch", got="no inputs", fix="pass it to step")
    if stage_kwargs is not None and not isinstance(stage_kwargs, dict):
        raise PipelineError(
            "stage_kwargs is a dict of keyword arguments", got=type(stage_kwargs).__name__, fix="pass {name: value}"
        )
    arguments = cut(inputs, count, chunk, "the batch") if 0 in stages else [()] * count
    named = cut(keywords, count, chunk, "the batch") if 0 in stages else [None] * count
    targets = cut(target, count, chunk, "the target") if last in stages else [None] * count
    shared = cut(stage_kwargs, count, chunk, "stage_kwargs")
    shares = weights(targets if target is not None else arguments, chunk)
    return [Microbatch(*parts) for parts in zip(arguments, named, shared, targets, shares, strict=True)]
