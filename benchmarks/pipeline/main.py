"""Training steps on several processes, by torch.distributed.pipelining's schedules and by ours, in one run.

    python benchmarks/pipeline/main.py [--ranks N] [--device cuda] [--dims 64,256,512] [--rounds N] [--json]

On CPUs: GPT blocks, two for each stage of a schedule with two stages a rank, microbatches of 2 × 64 tokens, gloo ranks
with one thread each. On a GPU, which the ranks share as small GPUs (``tests/small_gpus.py``): eight blocks in bfloat16,
eight microbatches of 4 × 512 tokens, NCCL.

Each round times each row in turn: some steps that follow each other, as in training, of a pipeline that is built for
that and closed afterwards, since threads and communicators of others would disturb it. Efficiency is the one-process
time over (ranks × pipeline time), the median of the rounds' own ratios: 1 is no idle time and no overhead. *Side by
side* is the one-process step on all ranks at once: what the machine leaves of 1 when all of it is at work.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
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
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from models import gpt

from gloo import free_port, join_group
from small_gpus import become_small_gpu, mps
from sternway import pipeline, split
from sternway.schedule import Costs, Schedule, Timeline, lower_bound

LOOPED = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
TORCH = ("ScheduleGPipe", "Schedule1F1B", *LOOPED, *V_SHAPED)
OURS = ("1f1b", "zb-h1", "zb-h2", "zb-v", "auto")
SIDE_BY_SIDE = "side by side, no pipeline"
TRIALS = 60  # steps in which "auto" tries plans, before the first round
WARM_UP = 2  # steps before those that are timed, and rounds of one process

Step = Callable[[Tensor, Tensor], Any]
Row = Callable[[], AbstractContextManager[Step]]
"""Builds a pipeline, gives its step, and closes it."""


@dataclass(frozen=True)
class Case:
    """What is trained, and on what."""

    ranks: int
    device: str
    dim: int
    blocks: int
    microbatches: int
    rows: int  # of a microbatch
    length: int
    rounds: int
    steps: int  # in one timing
    torchs: tuple[str, ...]
    ours: tuple[str, ...]

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        with torch.device(self.device):  # on a CPU, to make the random weights would take longer than all steps
            return gpt(self.dim, self.blocks, heads=max(4, self.dim // 128)).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        shape = self.microbatches * self.rows, self.length, self.dim
        x, target = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        return x, target


def case_of(arguments: argparse.Namespace, dim: int) -> Case:
    on_gpu, ranks = arguments.device == "cuda", arguments.ranks
    v_shaped = on_gpu or torch.__version__ >= "2.13"  # torch 2.11's send to themselves there, which gloo refuses
    return Case(
        ranks, arguments.device, dim,
        blocks=max(8, 2 * ranks),
        microbatches=max(8, 2 * ranks),
        rows=4 if on_gpu else 2,
        length=512 if on_gpu else 64,
        rounds=arguments.rounds,
        steps=arguments.steps,
        torchs=tuple(name for name in arguments.torchs.split(",") if name and (v_shaped or name not in V_SHAPED)),
        ours=tuple(arguments.ours.split(",")),
    )  # fmt: skip


# The rows


def one_process(case: Case) -> Step:
    """The whole model on one process, microbatch by microbatch."""
    model = case.model()

    def step(x: Tensor, target: Tensor) -> None:
        for part, goal in zip(x.chunk(case.microbatches), target.chunk(case.microbatches), strict=True):
            (F.mse_loss(model(part), goal) / case.microbatches).backward()

    return step


@contextmanager
def torch_row(name: str, rank: int, case: Case) -> Iterator[Step]:
    """By a schedule of torch's."""
    ranks = case.ranks
    mine = [rank, rank + ranks] if name in LOOPED else [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank]
    count, blocks = ranks * len(mine), list(case.model())
    size = case.blocks // count
    device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
    stages = [
        pipelining.PipelineStage(nn.Sequential(*blocks[i * size : (i + 1) * size]), i, count, device) for i in mine
    ]
    kind = getattr(torchs, name)
    single = issubclass(kind, torchs.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, case.microbatches, loss_fn=F.mse_loss)

    def step(x: Tensor, target: Tensor) -> None:
        arguments = (x,) if 0 in mine else ()
        options: dict[str, Any] = {"target": target, "losses": []} if count - 1 in mine else {}
        schedule.step(*arguments, **options)

    yield step


@dataclass
class OurRow:
    """By a schedule of ours. What "auto" kept in the first round, after its trials, stays.

    A name that ends in "+graphs" runs its stages as CUDA graphs, one in "+accelerated" with ``split.accelerate()``.
    """

    name: str
    case: Case
    schedule: Schedule | None = None
    costs: Costs | None = None
    tried: tuple[str, ...] = ()  # by "auto"
    timeline: Timeline | None = None  # of the last round's last step

    @contextmanager
    def build(self) -> Iterator[Step]:
        case, (x, target) = self.case, self.case.batch()
        name, _, how = self.name.partition("+")
        split.accelerate(how == "accelerated")
        known = name != "auto" or self.schedule is not None
        pipe = pipeline.Pipeline(
            case.model(), schedule=self.schedule or name, n_microbatches=case.microbatches, loss_fn=F.mse_loss,
            cuda_graphs=how == "graphs",
            sample=None if known else x[: case.rows], sample_target=None if known else target[: case.rows],
        )  # fmt: skip
        with closing(pipe):
            for _ in range(0 if known else TRIALS):
                pipe.step(x, target=target)
            self.schedule, self.costs = pipe.schedule, self.costs or pipe.costs
            self.tried = self.tried or tuple(map(str, pipe.plans))
            yield lambda x, target: pipe.step(x, target=target)
            self.timeline = pipe.step(x, target=target).timeline


# Measuring


def run(rank: int, port: int, cases: list[Case], shared: dict[str, str], limit: float, results: Any) -> None:
    ranks = cases[0].ranks
    if cases[0].device == "cuda":
        become_small_gpu(rank, ranks, port, "eager", shared, timeout=limit)
    else:
        join_group(rank, ranks, port)
    rows = [measure(rank, case) for case in cases]
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, case: Case) -> dict[str, Any]:
    x, target = case.batch()
    together = dist.new_group(backend="gloo")

    def timed(step: Step | None) -> float:
        """The seconds of a step among ``case.steps``, all ranks together."""
        dist.barrier(together)
        start = time.perf_counter()
        for _ in range(case.steps if step is not None else 0):
            assert step is not None
            step(x, target)
        if case.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(together)
        return (time.perf_counter() - start) / case.steps

    alone = one_process(case)
    ours = {name: OurRow(name, case) for name in case.ours}
    rows: dict[str, Row] = {
        "torch " + name.removeprefix("Schedule"): functools.partial(torch_row, name, rank, case) for name in case.torchs
    }
    rows |= {"sternway " + name: row.build for name, row in ours.items()}
    seconds: dict[str, list[float]] = {name: [] for name in (SIDE_BY_SIDE, *rows)}
    single: list[float] = []
    for _ in range(WARM_UP):
        timed(alone)
    for _ in range(case.rounds):
        single.append(timed(alone if rank == 0 else None))
        seconds[SIDE_BY_SIDE].append(timed(alone) / case.ranks)  # as many times the work
        for name, row in rows.items():
            gc.collect()
            gc.disable()
            with row() as step:
                for _ in range(WARM_UP):
                    step(x, target)
                seconds[name].append(timed(step))
            gc.enable()
            if rank == 0:
                sys.stderr.write(f"{name}: {1e3 * seconds[name][-1]:.1f} ms\n")  # a log of a hang says where
    return _summary(case, single, seconds, ours) if rank == 0 else {}


def _summary(
    case: Case, single: list[float], seconds: dict[str, list[float]], ours: dict[str, OurRow]
) -> dict[str, Any]:
    efficiency = {
        name: statistics.median(one / (case.ranks * s) for one, s in zip(single, values, strict=True))
        for name, values in seconds.items()
    }
    best = {
        who: max((v for k, v in efficiency.items() if k.startswith(who)), default=0.0) for who in ("torch", "stern")
    }
    return {
        "ranks": case.ranks,
        "device": case.device,
        "dim": case.dim,
        "one_process_ms": 1e3 * statistics.median(single),
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
        "efficiency": efficiency,
        "over_torch": best["stern"] / best["torch"] if best["torch"] else None,
        "schedules": {name: row.schedule.name for name, row in ours.items() if row.schedule is not None},
        "one_step": {name: _one_step(row) for name, row in ours.items()},
    }


def _one_step(row: OurRow) -> dict[str, Any]:
    """The last step, as it was measured and as it was planned."""
    assert row.schedule is not None, "there is a round"
    assert row.costs is not None
    assert row.timeline is not None
    return {
        "makespan_ms": 1e3 * row.timeline.makespan,
        "busy_ms": [1e3 * s for s in row.timeline.busy],
        "idle_ms": [1e3 * s for s in row.timeline.idle],
        "action_ms": _by_kind(row.timeline),
        "planned_ms": 1e3 * row.schedule.simulate(row.costs).period,
        "bound_ms": 1e3 * _bound(row),  # no order of these stages can be faster, with these costs
        "costs": repr(row.costs),
        "tried": row.tried,
    }


def _bound(row: OurRow) -> float:
    assert row.schedule is not None, "there is a round"
    assert row.costs is not None
    stages, ranks = row.schedule.placement[0], row.case.ranks
    return lower_bound(
        row.costs,
        ranks=ranks,
        microbatches=row.case.microbatches,
        memory_limit=row.case.microbatches,  # of all, that is: no limit
        stages_per_rank=len(stages),
        looped=stages == (0, ranks),
    )


def _by_kind(timeline: Timeline) -> dict[str, float]:
    """The median of each kind of action, in ms."""
    kinds: dict[str, list[float]] = {}
    for event in (event for rank in timeline.events for event in rank):
        kinds.setdefault("+".join(a.op for a in event.action.actions), []).append(1e3 * (event.end - event.start))
    return {kind: statistics.median(times) for kind, times in kinds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps that follow each other in one timing")
    parser.add_argument("--dims", default=None)
    parser.add_argument("--limit", type=float, default=600, help="after so many seconds, GPU ranks say where they hang")
    parser.add_argument("--ours", default=",".join(OURS), help="schedules, also NAME+graphs, NAME+accelerated")
    parser.add_argument("--torchs", default=",".join(TORCH))
    arguments = parser.parse_args()
    dims = arguments.dims or ("2048" if arguments.device == "cuda" else "64,256,512")
    cases = [case_of(arguments, int(dim)) for dim in dims.split(",")]
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port, shared = free_port(), mps() if arguments.device == "cuda" else {}
    processes = [
        context.Process(target=run, args=(rank, port, cases, shared, arguments.limit, results))
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    rows = results.get()
    for process in processes:
        process.join()
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "rounds": arguments.rounds, "rows": rows}))
    else:
        print_table(rows, arguments)


def print_table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    print(
        f"torch {torch.__version__}, {arguments.ranks} ranks on {arguments.device}, {arguments.rounds} rounds of",
        end="",
    )
    print(f" {arguments.steps} steps\n")
    print("| efficiency | " + " | ".join(f"d={row['dim']}" for row in rows) + " |")
    print("| --- " * (len(rows) + 1) + "|")
    for name in rows[0]["efficiency"]:
        print(f"| {name} | " + " | ".join(f"{row['efficiency'][name]:.2f}" for row in rows) + " |")
    print("| **ours over torch's best** | " + " | ".join(f"**{row['over_torch'] or 0:.2f}**" for row in rows) + " |")
    print("| one process, ms | " + " | ".join(f"{row['one_process_ms']:.1f}" for row in rows) + " |")
    if all("auto" in row["one_step"] for row in rows):
        each = [row["one_step"]["auto"] for row in rows]
        measured = [row["step_ms"]["sternway auto"] for row in rows]
        bounds = [row["one_process_ms"] / (row["ranks"] * one["bound_ms"]) for row, one in zip(rows, each, strict=True)]
        planned = [one["planned_ms"] / ms for one, ms in zip(each, measured, strict=True)]
        print("| bound of all orders, by the costs of auto | " + " | ".join(f"{bound:.2f}" for bound in bounds) + " |")
        print("| planned / measured step, auto | " + " | ".join(f"{ratio:.2f}" for ratio in planned) + " |")
    print("| auto chose | " + " | ".join(row["schedules"].get("auto", "") for row in rows) + " |")


if __name__ == "__main__":
    main()
