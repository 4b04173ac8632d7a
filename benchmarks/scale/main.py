"""What would a run on 64 to 4,096 GPUs be like? Plans, simulated with the costs of real machines.

    python benchmarks/scale/main.py [--json] [--ranks 64,256,1024,4096]

A GPT is trained with tensor parallelism within a machine (8 GPUs), a pipeline across machines and copies of that. For
each size, every named schedule that fits the memory and a searched one are simulated; the best is kept. All figures
are computed, none measured: the assumptions are in ``Machine`` and ``Model``, and in docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass

from sternway import schedule
from sternway.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU, its links and its failures."""

    flops: float = 989e12  # H100 SXM, dense bf16
    reached: float = 0.45  # share of that in a large matrix product's layer, tensor parallel costs included
    memory: float = 80e9
    link: float = 50e9  # bytes a second and GPU between machines: 400 Gb/s InfiniBand
    latency: float = 10e-6
    tensor_parallel: int = 8  # one machine
    hours_between_failures: float = 50_000.0  # of one GPU and all that hangs on it: Llama 3's, see docs/scale.md
    storage: float = 2e9  # bytes a second and machine to shared storage
    restart: float = 300.0  # seconds from a failure to the first step: notice, start, load


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT, by its sizes."""

    name: str
    layers: int
    dim: int
    length: int = 8192
    vocabulary: int = 128_000

    @property
    def parameters(self) -> float:
        return 12 * self.layers * self.dim**2 + 2 * self.vocabulary * self.dim

    def forward_flops(self, layers: float) -> float:
        """Of one sequence through so many layers."""
        return self.length * layers * (24 * self.dim**2 + 4 * self.length * self.dim)


MODELS = {64: Model("13B", 40, 5120), 256: Model("70B", 80, 8192), 1024: Model("175B", 96, 12288)}
PIPELINES = {64: 4, 256: 8, 1024: 16, 4096: 16}  # machines in one pipeline
BATCH = {64: 512, 256: 1024, 1024: 1024, 4096: 2048}  # sequences in a step, of all copies


@dataclass(frozen=True, slots=True)
class Row:
    """One size of machine, predicted."""

    gpus: int
    model: str
    pipeline: int
    copies: int
    microbatches: int
    schedule: str
    bubble: float
    step_seconds: float
    model_flops_used: float
    memory_gb: float
    failure_hours: float
    save_seconds: float
    interval_minutes: float
    lost: float
    search_seconds: float

    @property
    def efficiency(self) -> float:
        """Of the hours paid for, those that train: no bubble, no gradients on their way, nothing done twice."""
        return (1 - self.bubble) * (1 - self.lost)


def predict(gpus: int, machine: Machine) -> Row:
    model = MODELS.get(gpus, MODELS[1024])
    stages, tensor = PIPELINES[gpus], machine.tensor_parallel
    copies = gpus // (stages * tensor)
    microbatches = BATCH[gpus] // copies
    seconds = model.forward_flops(model.layers / stages) / (machine.flops * machine.reached * tensor)
    sent = 2 * model.length * model.dim / tensor  # bf16 activations, each GPU its share
    costs = schedule.Costs(
        F=seconds, I=seconds, W=seconds, comm=machine.latency + sent / machine.link, memory_after_I=0.4
    )
    # Activations of one microbatch in one rank's share, recomputing attention's inner ones: 18 bytes a number.
    activation = 18 * model.length * model.dim * model.layers / stages / tensor
    share = model.parameters / (stages * tensor)
    fixed = 6 * share + 12 * share / copies  # weights and gradients; optimizer state spread over the copies
    limit = (0.9 * machine.memory - fixed) / activation
    start = time.perf_counter()
    best = _best(costs, stages, microbatches, limit)
    searched = time.perf_counter() - start
    reduce = 2 * 2 * share / machine.link * (copies - 1) / copies  # gradients of all copies, not hidden
    step = best.makespan + reduce
    used = 3 * model.forward_flops(model.layers) * BATCH[gpus] / (gpus * machine.flops * step)
    between = 3600 * machine.hours_between_failures / gpus
    save = 14 * model.parameters / (machine.storage * stages)  # bf16 weights, fp32 weights and two moments, once
    interval = young_daly(save / 10, between)  # in the background: training waits for the copy, a tenth at most
    lost = overhead(save / 10, interval, between, machine.restart)
    return Row(
        gpus, model.name, stages, copies, microbatches, best.schedule.name,
        1 - best.bound / step, step, used, (fixed + best.peak_memory * activation) / 1e9,
        between / 3600, save, interval / 60, lost, searched,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan that fits."""

    schedule: schedule.Schedule
    makespan: float
    bound: float  # the work of one rank
    peak_memory: float


def _best(costs: schedule.Costs, ranks: int, microbatches: int, limit: float) -> Found:
    plans = []
    for name in schedule.names():
        try:
            plans.append(schedule.make(name, ranks=ranks, microbatches=microbatches))
        except ScheduleError:
            continue
    for stages_per_rank in (1, 2):
        try:
            plans.append(
                schedule.search(
                    costs, ranks=ranks, microbatches=microbatches, memory_limit=limit, stages_per_rank=stages_per_rank
                )
            )
        except ScheduleError:
            continue
    timelines = [t for t in (plan.simulate(costs) for plan in plans) if t.peak_memory <= limit]
    best = min(timelines, key=lambda timeline: timeline.makespan)
    return Found(best.schedule, best.makespan, max(best.busy), best.peak_memory)


def young_daly(save: float, between: float) -> float:
    """The interval at which saving costs as much as what is lost: Young 1974, Daly 2006, first order."""
    return math.sqrt(2 * save * between)


def overhead(save: float, interval: float, between: float, restart: float) -> float:
    """The share of time that goes into saving, into steps done twice, and into starting again."""
    return save / interval + (interval / 2 + restart) / between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", default="64,256,1024,4096")
    arguments = parser.parse_args()
    rows = [predict(int(gpus), Machine()) for gpus in arguments.ranks.split(",")]
    if arguments.json:
        print(json.dumps([{name: getattr(row, name) for name in Row.__slots__} for row in rows]))
        return
    print(table(rows))


def table(rows: list[Row]) -> str:
    """As docs/scale.md has it."""
    lines = {
        "GPUs": [str(row.gpus) for row in rows],
        "model": [row.model for row in rows],
        "machines in a pipeline × copies": [f"{row.pipeline} × {row.copies}" for row in rows],
        "microbatches": [str(row.microbatches) for row in rows],
        "best schedule": [row.schedule for row in rows],
        "step, s": [f"{row.step_seconds:.2f}" for row in rows],
        "idle: bubble and gradients on their way": [f"{row.bubble:.1%}" for row in rows],
        "model FLOP/s used": [f"{row.model_flops_used:.1%}" for row in rows],
        "memory of a GPU, GB": [f"{row.memory_gb:.0f}" for row in rows],
        "hours between failures": [f"{row.failure_hours:.0f}" for row in rows],
        "a save takes, s": [f"{row.save_seconds:.0f}" for row in rows],
        "save every, min": [f"{row.interval_minutes:.0f}" for row in rows],
        "lost to failures and saves": [f"{row.lost:.1%}" for row in rows],
        "**predicted efficiency**": [f"**{row.efficiency:.1%}**" for row in rows],
        "planning took, s": [f"{row.search_seconds:.1f}" for row in rows],
    }
    text = [f"| {name} | " + " | ".join(cells) + " |" for name, cells in lines.items()]
    return "\n".join([text[0], "| --- " * (len(rows) + 1) + "|", *text[1:]])


if __name__ == "__main__":
    main()
