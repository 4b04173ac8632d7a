"""What each process of the demo does: check, train, and be compared with torch's schedules."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sternway.cli._gpt import GPT
from sternway.cli._text import batches, standard_library
from sternway.pipeline import Pipeline, partition


@dataclass(frozen=True, slots=True)
class Options:
    """The size of the demo."""

    ranks: int = 2
    schedule: str = "auto"
    steps: int = 30
    microbatches: int = 8
    rows: int = 2  # in a microbatch
    length: int = 64
    dim: int = 256
    layers: int = 8
    compared_steps: int = 6


@dataclass(slots=True)
class Outcome:
    """What the first rank reports at the end."""

    losses: list[float] = field(default_factory=list)
    gradient_error: float = 0.0
    one_process: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    planned_bubble: float = 0.0
    measured_bubble: float = 0.0
    schedule_name: str = ""
    planned: Any = None  # Timelines
    measured: Any = None


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def run(rank: int, port: int, options: Options, reports: Any) -> None:
    """One process: ``reports`` gets ("step", …) while training and ("done", Outcome) at the end, from rank 0."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    try:
        outcome = _run(rank, options, reports)
        if rank == 0:
            reports.put(("done", outcome))
        dist.barrier()
    except Exception as error:
        reports.put(("error", f"rank {rank}: {error}"))
        raise
    finally:
        dist.destroy_process_group()


def _run(rank: int, options: Options, reports: Any) -> Outcome:
    data = batches(standard_library(), options.rows * options.microbatches, options.length)
    torch.manual_seed(0)
    model = GPT(vocabulary=256, dim=options.dim, heads=4, layers=options.layers, length=options.length)
    alone = copy.deepcopy(model)
    x, target = next(data)
    sample = slice(0, options.rows)
    pipe = Pipeline(
        copy.deepcopy(model),
        schedule=options.schedule,
        n_microbatches=options.microbatches,
        loss_fn=loss,
        sample=x[sample],
        sample_target=target[sample],
    )
    outcome = Outcome(schedule_name=pipe.schedule.name)
    outcome.gradient_error = _compare_gradients(pipe, alone, x, target)
    outcome.planned = pipe.schedule.simulate(pipe.costs)
    outcome.planned_bubble = outcome.planned.bubble_rate

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for step in range(options.steps):
        x, target = next(data)
        start = time.perf_counter()
        result = pipe.step(x, target=target, loss_everywhere=True, record=False)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None
        outcome.losses.append(float(result.loss))
        if rank == 0:
            reports.put(("step", step + 1, outcome.losses[-1], x.numel() / (time.perf_counter() - start)))
    _compare_speed(rank, options, pipe, model, alone, x, target, outcome, reports)
    outcome.measured_bubble = outcome.measured.bubble_rate
    return outcome


def _compare_gradients(pipe: Pipeline, alone: GPT, x: Tensor, target: Tensor) -> float:
    """The largest relative difference between this pipeline's gradients and one process's, over all ranks."""
    pipe.step(x, target=target)
    torch.autograd.backward(loss(alone(x), target))
    whole = dict(alone.named_parameters())
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        expected = whole[name].grad
        assert parameter.grad is not None
        assert expected is not None
        worst = max(worst, float((parameter.grad - expected).norm() / expected.norm()))
        parameter.grad = None
    alone.zero_grad()
    rows = pipe.transport.gather([[worst]])
    return max(row[0] for row in rows)


def _compare_speed(
    rank: int,
    options: Options,
    pipe: Pipeline,
    model: GPT,
    alone: GPT,
    x: Tensor,
    target: Tensor,
    outcome: Outcome,
    reports: Any,
) -> None:
    """One step in each way, again and again in turn, so that a slow moment of the machine touches all."""

    def one_process() -> None:
        pieces = zip(x.chunk(options.microbatches), target.chunk(options.microbatches), strict=True)
        for part, goal in pieces:
            torch.autograd.backward(loss(alone(part), goal) / options.microbatches)

    def ours() -> None:
        outcome.measured = pipe.step(x, target=target).timeline

    ways: dict[str, Callable[[], None]] = {f"sternway {pipe.schedule.name}": ours}
    for name, placement in _torch_schedules(options.ranks).items():
        ways[f"torch {name}"] = _torch_step(rank, name, placement, copy.deepcopy(model), options, x, target)
    seconds: dict[str, list[float]] = {name: [] for name in ("one process", *ways)}
    for number in range(options.compared_steps + 1):
        if rank == 0:
            reports.put(("phase", f"comparing with torch's schedules, round {number}"))
            seconds["one process"].append(_time(one_process))
        for name, way in ways.items():
            dist.barrier()
            _reset_peak()
            seconds[name].append(_time(way))
            outcome.peaks[name] = max(outcome.peaks.get(name, 0), _peak())
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items() if values}
    outcome.one_process = medians.pop("one process", 0.0)
    outcome.seconds = medians


def _torch_schedules(ranks: int) -> dict[str, list[list[int]]]:
    return {
        "Schedule1F1B": [[rank] for rank in range(ranks)],
        "ScheduleZBVZeroBubble": [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)],
    }


def _torch_step(
    rank: int, name: str, placement: list[list[int]], model: nn.Module, options: Options, x: Tensor, target: Tensor
) -> Callable[[], None]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    count = sum(map(len, placement))
    modules = partition(model, ranks=options.ranks, stages_per_rank=count // options.ranks)
    stages = [pipelining.PipelineStage(modules[i], i, count, torch.device("cpu")) for i in placement[rank]]
    kind = getattr(schedules, name)
    schedule = kind(stages if len(placement[rank]) > 1 else stages[0], options.microbatches, loss_fn=loss)

    def step() -> None:
        inputs = (x,) if 0 in placement[rank] else ()
        keywords: dict[str, Any] = {"target": target, "losses": []} if count - 1 in placement[rank] else {}
        schedule.step(*inputs, **keywords)

    return step


def _time(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _reset_peak() -> None:
    """Have the kernel count this process's peak memory from now on (Linux)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _peak() -> int:
    """This process's peak resident memory in bytes since ``_reset_peak``; 0 where the kernel does not say."""
    try:
        with open("/proc/self/status") as file:
            lines = [line for line in file if line.startswith("VmHWM")]
        return 1024 * int(lines[0].split()[1])
    except (OSError, IndexError):
        return 0
