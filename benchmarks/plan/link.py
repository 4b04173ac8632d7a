"""Is the plan the run where messages wait for each other? Two machines on one, and a link of 200 Mbit/s between them.

    sudo python benchmarks/plan/link.py [--rate 200mbit] [--bytes 262144,1048576] [--rounds N] [--json]

Blocks sleep for 10 ms a rank in an F, an I and a W (``asleep.py``); a message of 1 MiB takes 44 ms. What the steps of a
pipeline show becomes costs, and the step planned for these is compared with further steps: with ``comm_busy``, for
which messages of one direction follow each other, and without it, as if they did not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from asleep import AsleepBlock
from chaos.network import TwoMachines, possible

from sternway.pipeline import Pipeline
from sternway.schedule import Costs, measured_costs

SCHEDULES = "gpipe", "1f1b", "zb-h2", "interleaved-1f1b", "zb-v"
DIM, MICROBATCHES, SECONDS = 64, 8, 0.01
LOOKS, STEPS = 2, 6  # in a round: steps that show their times, and steps that are timed


def measure(name: str, nbytes: int, rounds: int) -> dict[str, float]:
    """One schedule: the step in milliseconds, and the planned one over it, with ``comm_busy`` and without."""
    torch.manual_seed(0)
    rows = MICROBATCHES * nbytes // (4 * DIM)
    x, target = torch.randn(rows, DIM), torch.randn(rows, DIM)
    model = nn.Sequential(*(AsleepBlock(DIM, *[SECONDS / 2] * 3) for _ in range(4)))
    with closing(Pipeline(model, schedule=name, n_microbatches=MICROBATCHES, loss_fn=F.mse_loss)) as pipe:
        for _ in range(2):
            pipe.step(x, target=target)
        shown, seconds = [], []
        for _ in range(rounds):
            shown += [pipe.step(x, target=target, record=True).timeline for _ in range(LOOKS)]
            start = time.perf_counter()
            for _ in range(STEPS):
                pipe.step(x, target=target)
            seconds.append((time.perf_counter() - start) / STEPS)
        costs, step = measured_costs(shown, Costs()), statistics.median(seconds)
        planned = [pipe.schedule.simulate(each).period for each in (costs, replace(costs, comm_busy=0.0))]
    return {"step_ms": 1e3 * step, "busy": costs.comm_busy, "planned": planned[0] / step, "alone": planned[1] / step}


def rank(sizes: list[int], names: list[str], rounds: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {nbytes: {name: measure(name, nbytes, rounds) for name in names} for nbytes in sizes}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--bytes", default="262144,1048576", help="of a message")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = list(map(int, arguments.bytes.split(",")))
    if "RANK" in os.environ:
        rank(sizes, arguments.schedules.split(","), arguments.rounds, arguments.out)
        return
    if why := possible():
        sys.exit(why)
    shape = {arguments.rate: f"tbf rate {arguments.rate} burst 32kbit latency 2s"}
    with tempfile.TemporaryDirectory() as folder, TwoMachines(shape) as machines:
        out, given = Path(folder) / "found.json", sys.argv[1:]
        logs = [Path(folder) / f"{number}.log" for number in range(2)]
        started = [
            machines.start(number, log, *given, "--out", str(out), program=Path(__file__).resolve())
            for number, log in enumerate(logs)
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit("\n----\n".join(log.read_text() for log in logs))
        found, link = json.loads(out.read_text()), machines.link  # "plain" if the kernel cannot limit its rate
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "link": link, "bytes": found}))
        return
    print(f"torch {torch.__version__}, 2 ranks, {link} between them\n")
    print("| message | schedule | step, ms | planned / measured | without comm_busy | comm_busy |")
    print("| --- | --- | --- | --- | --- | --- |")
    for nbytes, rows in found.items():
        for name, row in rows.items():
            cells = f"{row['step_ms']:.0f} | **{row['planned']:.2f}** | {row['alone']:.2f} | {row['busy']:.2f}"
            print(f"| {int(nbytes) >> 10} KiB | {name} | {cells} |")


if __name__ == "__main__":
    main()
