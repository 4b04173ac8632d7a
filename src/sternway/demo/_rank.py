"""What each process of the demo does: check the gradients, train, and time a step beside torch's schedules."""

from __future__ import annotations

import copy
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not exported to mypy

from sternway.demo._device import backend_of, meet, take_device
from sternway.demo._gpt import GPT, GPTStage
from sternway.demo._text import batches, next_byte_loss, standard_library
from sternway.demo._train import DemoOptions, DemoOutcome
from sternway.pipeline import Pipeline, StepResult


def run(rank: int, port: int, options: DemoOptions, reports: Any) -> None:
    """One process. Rank 0 puts ("progress", done, total, text) and at last ("done", outcome) into ``reports``.

    A rank that fails puts ("error", text, traceback).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(1)
    device = take_device(options.device, rank, options.ranks)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=options.ranks)
    try:
        outcome = _run(rank, options, device, reports)
        if rank == 0:
            reports.put(("done", outcome))
        meet()
    except Exception as error:
        reports.put(("error", f"rank {rank}: {error}", traceback.format_exc()))
        sys.exit(1)
    finally:
        dist.destroy_process_group()


class _Progress:
    """What rank 0 tells about how far all is: the steps of training, then those that are timed."""

    def __init__(self, options: DemoOptions, reports: Any) -> None:
        self._reports, self._done = reports, 0
        ways = 2 + len(_torch_schedules(options))  # one process, ours and torch's
        self._total = options.steps + ways * (options.compared_steps + 1)

    def about(self, text: str) -> None:
        """Something begins of which it is not known how long it takes."""
        self._put(None, text)

    def done(self, text: str) -> None:
        """One more step is done."""
        self._done += 1
        self._put(self._total, text)

    def _put(self, total: int | None, text: str) -> None:
        if self._reports is not None:
            self._reports.put(("progress", self._done, total, text))


def _run(rank: int, options: DemoOptions, device: torch.device, reports: Any) -> DemoOutcome:
    say = _Progress(options, reports if rank == 0 else None)
    say.about("measuring a microbatch, choosing a schedule")
    data = batches(standard_library(), options.rows * options.microbatches, options.length)
    torch.manual_seed(0)
    model = GPT(vocabulary=256, dim=options.dim, heads=4, layers=options.layers, length=options.length)
    model.to(device)
    alone = copy.deepcopy(model)
    x, target = (tensor.to(device) for tensor in next(data))
    sample = slice(0, options.rows)
    pipe = Pipeline(
        copy.deepcopy(model),
        schedule=options.schedule,
        n_microbatches=options.microbatches,
        loss_fn=next_byte_loss,
        sample=x[sample],
        sample_target=target[sample],
    )
    outcome = DemoOutcome(profile=pipe.profile)
    say.about("comparing the gradients with one process's")
    outcome.gradient_error = _compare_gradients(pipe, alone, x, target)

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    for _ in range(options.steps):
        x, target = (tensor.to(device) for tensor in next(data))
        start = time.perf_counter()
        result = pipe.step(x, target=target, loss_everywhere=True, record=False)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None
        outcome.losses.append(float(result.loss))
        speed = x.numel() / (time.perf_counter() - start)
        say.done(f"training: loss {outcome.losses[-1]:.3f}, {speed:,.0f} tokens/s")
    pipe.stop_tuning()  # what is timed from here on is one plan
    _compare_speed(rank, options, pipe, model, alone, x, target, outcome, say)
    outcome.measured_bubble = outcome.measured.bubble_rate
    ran = outcome.measured.schedule  # "auto" may have changed it since the first step
    outcome.schedule_name, outcome.planned = ran.name, ran.simulate(pipe.costs)
    outcome.planned_bubble = outcome.planned.bubble_rate
    ours = f"sternway {ran.name}"
    outcome.seconds = {ours if name == "sternway" else name: value for name, value in outcome.seconds.items()}
    outcome.peaks = {ours if name == "sternway" else name: value for name, value in outcome.peaks.items()}
    return outcome


def _compare_gradients(pipe: Pipeline, alone: GPT, x: Tensor, target: Tensor) -> float:
    """The largest relative difference between this pipeline's gradients and one process's, over all ranks."""
    pipe.step(x, target=target)
    torch.autograd.backward(next_byte_loss(alone(x), target))
    whole = dict(alone.named_parameters())
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        expected = whole[name].grad
        assert parameter.grad is not None
        assert expected is not None
        worst = max(worst, float((parameter.grad - expected).norm() / expected.norm()))
        parameter.grad = None
    alone.zero_grad()
    everywhere = torch.tensor(worst)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return float(everywhere)


def _compare_speed(
    rank: int,
    options: DemoOptions,
    pipe: Pipeline,
    model: GPT,
    alone: GPT,
    x: Tensor,
    target: Tensor,
    outcome: DemoOutcome,
    say: _Progress,
) -> None:
    """One step in each way, again and again in turn, so that a slow moment of the machine touches all."""

    def one_process() -> None:
        pieces = zip(x.chunk(options.microbatches), target.chunk(options.microbatches), strict=True)
        for part, goal in pieces:
            torch.autograd.backward(next_byte_loss(alone(part), goal) / options.microbatches)

    results: list[StepResult] = []

    def ours() -> None:
        results.append(pipe.step(x, target=target))

    ways: dict[str, Callable[[], None]] = {"sternway": ours}
    say.about("building torch's schedules")
    for name, placement in _torch_schedules(options).items():
        ways[f"torch {name}"] = _torch_step(rank, name, placement, copy.deepcopy(model), options, x, target)
    seconds: dict[str, list[float]] = {name: [] for name in ("one process", *ways)}
    for number in range(options.compared_steps + 1):
        words = "timing a step" if number else "warming up"
        if rank == 0:
            seconds["one process"].append(_time(one_process))
            say.done(f"{words}: one process")
        for name, way in ways.items():
            meet()
            _reset_peak(x.device)
            seconds[name].append(_time(way))
            outcome.peaks[name] = max(outcome.peaks.get(name, 0), _peak(x.device))
            say.done(f"{words}: {name}")
    outcome.measured = results[-1].timeline
    most = torch.tensor(list(outcome.peaks.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    outcome.peaks = dict(zip(outcome.peaks, most.tolist(), strict=True))
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items() if values}
    outcome.one_process = medians.pop("one process", 0.0)
    outcome.seconds = medians


def _torch_schedules(options: DemoOptions) -> dict[str, list[list[int]]]:
    """Two of torch's own schedules, and where their stages are."""
    ranks, release = options.ranks, tuple(map(int, torch.__version__.split(".")[:2]))
    found = {"Schedule1F1B": [[rank] for rank in range(ranks)]}
    if release >= (2, 13) or torch.device(options.device).type == "cuda":
        found["ScheduleZBVZeroBubble"] = [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    else:  # there V schedules send to themselves, which gloo refuses
        found["ScheduleInterleavedZeroBubble"] = [[rank, rank + ranks] for rank in range(ranks)]
    return found


def _torch_step(
    rank: int, name: str, placement: list[list[int]], model: GPT, options: DemoOptions, x: Tensor, target: Tensor
) -> Callable[[], None]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    count = sum(map(len, placement))
    stages = [pipelining.PipelineStage(GPTStage(model, i, count), i, count, x.device) for i in placement[rank]]
    kind = getattr(schedules, name)
    schedule = kind(stages if len(placement[rank]) > 1 else stages[0], options.microbatches, loss_fn=next_byte_loss)

    def step() -> None:
        inputs = (x,) if 0 in placement[rank] else ()
        keywords: dict[str, Any] = {"target": target, "losses": []} if count - 1 in placement[rank] else {}
        schedule.step(*inputs, **keywords)

    return step


def _time(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _reset_peak(device: torch.device) -> None:
    """Count this process's peak memory on a device from now on; on the CPU, the kernel counts (Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def _peak(device: torch.device) -> int:
    """This process's peak memory in bytes since ``_reset_peak``; 0 where the kernel does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/status") as file:
            lines = [line for line in file if line.startswith("VmHWM")]
        return 1024 * int(lines[0].split()[1])
    except (OSError, IndexError):
        return 0
