"""A training step on two processes, by torch.distributed.pipelining's schedules and by ours, in one run.

    python benchmarks/pipeline/main.py [--json] [--rounds N] [--dims 64,256,512]

Eight GPT blocks, eight microbatches of 2 × 64 tokens, two gloo ranks with one thread each. Each round runs one step in
one process, one in both at once without a pipeline, and one step by every schedule, in turn. Efficiency is the
one-process step over (ranks × pipeline step), the median of the rounds' own ratios: 1 is no idle time and no overhead.
The two steps side by side say what the machine leaves of that when all its cores are at work.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torchs
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models import gpt

from sternway import pipeline

RANKS, MICROBATCHES, BLOCKS = 2, 8, 8
TORCH = {  # name: stages on each rank
    "ScheduleGPipe": ([0], [1]),
    "Schedule1F1B": ([0], [1]),
    "ScheduleInterleaved1F1B": ([0, 2], [1, 3]),
    "ScheduleInterleavedZeroBubble": ([0, 2], [1, 3]),
    "ScheduleZBVZeroBubble": ([0, 3], [1, 2]),
    "ScheduleDualPipeV": ([0, 3], [1, 2]),
}
SIDE_BY_SIDE = "side by side, no pipeline"
OURS = ("1f1b", "zb-h1", "zb-v", "auto")


class OneProcess:
    """The whole model on one process, microbatch by microbatch."""

    def __init__(self, dim: int) -> None:
        self.model = _model(dim)

    def step(self, x: Tensor, target: Tensor) -> None:
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(self.model(part), goal) / MICROBATCHES).backward()


def _model(dim: int) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(dim, BLOCKS)


def torch_step(name: str, rank: int, dim: int) -> tuple[Callable[[Tensor, Tensor], Any], list[nn.Module]]:
    mine, blocks = TORCH[name][rank], list(_model(dim))
    count = sum(map(len, TORCH[name]))
    size = BLOCKS // count
    modules = [nn.Sequential(*blocks[i * size : (i + 1) * size]) for i in mine]
    stages = [
        pipelining.PipelineStage(module, i, count, torch.device("cpu")) for i, module in zip(mine, modules, strict=True)
    ]
    kind = getattr(torchs, name)
    single = issubclass(kind, torchs.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=F.mse_loss)

    def step(x: Tensor, target: Tensor) -> None:
        arguments = (x,) if 0 in mine else ()
        options: dict[str, Any] = {"target": target, "losses": []} if count - 1 in mine else {}
        schedule.step(*arguments, **options)

    return step, modules


def our_step(name: str, dim: int, sample: Tensor) -> tuple[Callable[[Tensor, Tensor], Any], pipeline.Pipeline]:
    pipe = pipeline.Pipeline(
        _model(dim),
        schedule=name,
        n_microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        sample=sample if name == "auto" else None,
        sample_target=torch.zeros_like(sample),
    )
    return lambda x, target: pipe.step(x, target=target), pipe


def run(rank: int, port: int, dims: list[int], rounds: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    rows = [measure(rank, dim, rounds) for dim in dims]
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, dim: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(1)
    x, target = torch.randn(2 * MICROBATCHES, 64, dim), torch.randn(2 * MICROBATCHES, 64, dim)
    alone = OneProcess(dim)
    steps: dict[str, Callable[[Tensor, Tensor], Any]] = {}
    for name in TORCH:
        steps["torch " + name.removeprefix("Schedule")], _ = torch_step(name, rank, dim)
    pipes = {}
    for name in OURS:
        steps["sternway " + name], pipes[name] = our_step(name, dim, x[:2])
    seconds: dict[str, list[float]] = {name: [] for name in (SIDE_BY_SIDE, *steps)}
    single: list[float] = []
    predicted: list[float] = []
    gc.disable()
    for number in range(rounds + 2):  # two to warm up
        gc.collect()
        dist.barrier()
        if rank == 0:
            start = time.perf_counter()
            alone.step(x, target)
            single.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        alone.step(x, target)
        dist.barrier()
        seconds[SIDE_BY_SIDE].append((time.perf_counter() - start) / RANKS)  # as many times the work
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            result = step(x, target)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            if name == "sternway auto" and number >= 2:
                predicted.append(_planned(pipes["auto"]) / result.timeline.makespan)
    gc.enable()
    if rank:
        return {}
    single = single[2:]
    efficiency = {
        name: statistics.median(one / (RANKS * s) for one, s in zip(single, values[2:], strict=True))
        for name, values in seconds.items()
    }
    best = {who: max(v for k, v in efficiency.items() if k.startswith(who)) for who in ("torch", "sternway")}
    return {
        "dim": dim,
        "one_process_ms": 1e3 * statistics.median(single),
        "step_ms": {name: 1e3 * statistics.median(values[2:]) for name, values in seconds.items()},
        "efficiency": efficiency,
        "best_torch": best["torch"],
        "best_sternway": best["sternway"],
        "over_torch": best["sternway"] / best["torch"],
        "auto_schedule": pipes["auto"].schedule.name,
        "planned_over_measured": statistics.median(predicted),
    }


def _planned(pipe: pipeline.Pipeline) -> float:
    return pipe.schedule.simulate(pipe.costs).makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dims", default="64,256,512")
    arguments = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dims = [int(dim) for dim in arguments.dims.split(",")]
    processes = [context.Process(target=run, args=(r, port, dims, arguments.rounds, results)) for r in range(RANKS)]
    for process in processes:
        process.start()
    rows = results.get()
    for process in processes:
        process.join()
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "rounds": arguments.rounds, "rows": rows}))
        return
    print(f"torch {torch.__version__}, {RANKS} gloo ranks, one thread each, {arguments.rounds} rounds\n")
    print("| efficiency | " + " | ".join(f"d={row['dim']}" for row in rows) + " |")
    print("| --- " * (len(rows) + 1) + "|")
    for name in rows[0]["efficiency"]:
        print(f"| {name} | " + " | ".join(f"{row['efficiency'][name]:.2f}" for row in rows) + " |")
    print("| **ours over torch's best** | " + " | ".join(f"**{row['over_torch']:.2f}**" for row in rows) + " |")
    print("| one process, ms | " + " | ".join(f"{row['one_process_ms']:.1f}" for row in rows) + " |")
    print(
        "| planned / measured makespan, auto | " + " | ".join(f"{r['planned_over_measured']:.2f}" for r in rows) + " |"
    )
    print("| auto chose | " + " | ".join(row["auto_schedule"] for row in rows) + " |")


if __name__ == "__main__":
    main()
