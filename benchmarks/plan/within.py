"""Sixteen blocks within 100%, 60% and 40% of 1F1B's bytes: "auto" beside every named schedule that can be made to fit.

Other shares are given by ``--shares``. Each named schedule recomputes as little as its own order must
(``Pipeline(schedule=name, memory=…)``), which is no more than the best setting for all stages alike. Blocks sleep, so
that four ranks need no four cores; they are narrow and have many tokens, so that most bytes are activations. Bytes are
counted, and gradients compared with one process.
All pipelines of a limit are built, and then timed in turn, round after round.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from asleep import AsleepMLP
from measure import Case, step_seconds
from torch import Tensor, nn
from torch.nn import functional as F

from sternway import pipeline
from sternway._torch.memory import OperationCounter
from sternway.errors import PipelineError
from sternway.pipeline import Pipeline

BLOCKS = 16
DIM, LENGTH = 32, 512


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    seconds = case.asleep * case.ranks / BLOCKS
    return nn.Sequential(*(AsleepMLP(DIM, seconds, seconds, seconds) for _ in range(BLOCKS)))


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = (torch.randn(rows, LENGTH, DIM) for _ in range(2))
    return x, target


def _awake(case: Case, x: Tensor, target: Tensor) -> dict[str, Tensor | None]:
    """The gradients of one process."""
    model = _model(case)
    for block in model.modules():
        if isinstance(block, AsleepMLP):
            block.f = block.i = block.w = 0.0
    F.mse_loss(model(x), target).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _held(pipe: Pipeline, x: Tensor, target: Tensor) -> int:
    """The bytes of this rank when it holds most, AdamW's state included; with one step in ``.grad`` afterwards."""
    with OperationCounter() as counter:
        pipe.step(x, target=target)  # now it knows what was there before
        for parameter in pipe.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        before = counter.peak = counter.now
        pipe.step(x, target=target)
    return 4 * sum(parameter.nbytes for parameter in pipe.parameters()) + counter.peak - before


def within(rank: int, case: Case, path: str) -> None:
    """Run it on this rank; the first one writes what was found to a file."""
    (x, target), (sample, sample_target) = _batch(case.rows * case.microbatches), _batch(case.rows)
    expected = _awake(case, x, target)
    counts: dict[str, Any] = {"ranks": case.ranks, "n_microbatches": case.microbatches, "loss_fn": F.mse_loss}
    plain = pipeline.fit(_model(case), sample, target=sample_target, schedule="1f1b", **counts)
    needed = max(way.peak for way in plain.ways if not way.recompute)
    found: list[dict[str, Any]] = []
    for share in case.shares:
        limit = int(share * needed)
        with ExitStack() as stack:
            pipes: dict[str, Pipeline | None] = {}
            for name in [*case.names(), "auto"]:
                known: dict[str, Any] = {"sample": sample, "sample_target": sample_target, "memory": limit}
                pipes[name] = pipe = _pipeline(case, name, counts | known)
                if pipe is not None:
                    stack.enter_context(closing(pipe))
                    _train(pipe, x, target, case.all_steps if name == "auto" else 2)
            fits = {name: pipe for name, pipe in pipes.items() if pipe is not None}
            seconds: dict[str, list[float]] = {name: [] for name in fits}
            for _ in range(case.rounds):
                for name, pipe in fits.items():
                    seconds[name].append(step_seconds(pipe, x, target, case.steps))
            for name in pipes:
                row: dict[str, Any] = {"share": share, "schedule": name, "fits": name in fits}
                if name in fits:
                    row |= _row(fits[name], seconds[name], limit, x, target, expected)
                found.append(row)
                if rank == 0:
                    sys.stderr.write(f"{row}\n")
    if rank == 0:
        Path(path).write_text(json.dumps({"ranks": case.ranks, "needed": needed, "rows": found}))


def _pipeline(case: Case, name: str, options: dict[str, Any]) -> Pipeline | None:
    """A pipeline of a schedule within the limit, or None where it cannot be made to fit."""
    try:
        return Pipeline(_model(case), schedule=name, **options)
    except PipelineError as error:
        if "must fit into memory" not in str(error):
            raise
        return None


def _train(pipe: Pipeline, x: Tensor, target: Tensor, steps: int) -> None:
    for _ in range(steps):
        pipe.step(x, target=target)
    pipe.stop_tuning()


def _row(
    pipe: Pipeline,
    seconds: list[float],
    limit: int,
    x: Tensor,
    target: Tensor,
    expected: dict[str, Tensor | None],
) -> dict[str, Any]:
    """What was measured of a pipeline; its gradients must be those of one process."""
    held = _held(pipe, x, target)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    return {
        "step_ms": 1e3 * statistics.median(seconds),
        "rounds_ms": [round(1e3 * each, 1) for each in seconds],
        "held_over_limit": max(pipe.transport.crew().share(held)) / limit,
        "plan": pipe.schedule.name,
        "stages": pipe.schedule.num_stages,
        "again": [share for stage, *share in map(_entry, pipe.schedule.recompute)],
        "story": [str(plan) for plan in pipe.plans],
    }


def _entry(again: Any) -> tuple[int, float, float]:
    """A stage, and the shares of its blocks that are recomputed, whole and selectively."""
    stage, whole, some = (*again, 0.0)[:3] if isinstance(again, tuple) else (again, 1.0, 0.0)
    return stage, whole, some


def print_within(found: dict[str, Any]) -> None:
    """A column for each share of 1F1B's bytes: milliseconds of a step, and the bytes over the limit."""
    shares = sorted({row["share"] for row in found["rows"]}, reverse=True)
    print("| | " + " | ".join(f"{share:.0%} of 1F1B's bytes: step, ms | held / limit" for share in shares) + " |")
    print("| --- |" + " --- | --- |" * len(shares))
    for name in dict.fromkeys(row["schedule"] for row in found["rows"]):
        rows = {row["share"]: row for row in found["rows"] if row["schedule"] == name}
        cells = (
            f"{rows[share]['step_ms']:.0f} | {rows[share]['held_over_limit']:.2f}"
            if rows[share]["fits"]
            else "does not fit | "
            for share in shares
        )
        print(f"| {name} | " + " | ".join(cells) + " |")
