"""Is the plan the run? Planned and measured steps, predicted and measured memory, and "auto" beside all schedules.

    python benchmarks/plan/main.py [--ranks 2,4,8] [--device cuda] [--bytes] [--json]
        [--asleep MS [--spread S | --drift | --within]]

GPT blocks, two for each rank, and twice as many microbatches as ranks. On CPUs: microbatches of 2 × 64 tokens, gloo
ranks with one thread each. On a GPU, which the ranks share as small GPUs (``tests/small_gpus.py``): bfloat16,
microbatches of 4 × 512 tokens, NCCL.

With ``--asleep``, blocks sleep instead of computing, so that any number of ranks can be timed on few cores: what is
measured is the plan and what runs it (``asleep.py``). With ``--spread`` besides, the sleeps of a rank differ at random,
as actions do on a machine with other work; with ``--drift``, one rank becomes slower (``drift.py``); with ``--within``,
sixteen blocks have less and less memory (``within.py``).

Each round times each schedule in turn, by a pipeline that is built for that and closed afterwards. A time is that of a
step among steps that follow each other. Figures are medians of the rounds' own ratios.

    planned / measured   the time of a step: simulated with the costs that every second step has shown, over measured
    predicted / measured bytes that a rank holds in a step beyond parameters and gradients: what ``fit`` says, over what
                         is counted (storages on a CPU, ``max_memory_allocated`` on a GPU)
    auto / named         the time of a step: of "auto" by the plan that it has kept after 100 steps, and of these steps
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from drift import drift
from measure import Case, measure
from within import print_within, within

from gloo import PRELOADED, join_group, on_ranks
from small_gpus import become_small_gpu, mps


def run(case: Case, limit: float, what: Callable[[int, Case, str], None] = measure) -> dict[str, Any]:
    """What was found with so many ranks."""
    join = join_group
    if case.device == "cuda":
        join = functools.partial(become_small_gpu, init="both", shared=mps(), timeout=limit)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        on_ranks(case.ranks, what, case, str(path), timeout=limit, join=join)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="steps in one timing of a named schedule")
    parser.add_argument("--all-steps", type=int, default=100, help="steps of auto, its tries included")
    parser.add_argument("--dim", type=int, default=None)
    parser.add_argument("--asleep", type=float, default=0.0, metavar="MS", help="blocks sleep: an F, I, W of a rank")
    parser.add_argument("--spread", type=float, default=0.0, help="with --asleep: how much actions differ, such as 0.2")
    parser.add_argument("--drift", action="store_true", help="with --asleep: a rank becomes slower in mid-run")
    parser.add_argument("--within", action="store_true", help="with --asleep: less and less memory")
    parser.add_argument("--shares", default="1,0.6,0.4", help="with --within: of 1F1B's bytes")
    parser.add_argument("--bytes", action="store_true", help="memory alone, which does not depend on the load")
    parser.add_argument("--schedules", default="", help="of the named ones, these alone")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one number of ranks")
    arguments = parser.parse_args()
    PRELOADED.append("models")
    dim = arguments.dim or (2048 if arguments.device == "cuda" else 96)
    only = tuple(name for name in arguments.schedules.split(",") if name)
    cases = [
        Case(
            int(ranks),
            arguments.device,
            dim,
            arguments.rounds,
            arguments.steps,
            arguments.all_steps,
            only,
            times=not arguments.bytes,
            asleep=arguments.asleep / 1e3,
            spread=arguments.spread,
            shares=tuple(map(float, arguments.shares.split(","))),
        )
        for ranks in arguments.ranks.split(",")
    ]
    if (arguments.drift or arguments.within or arguments.spread) and not arguments.asleep:
        parser.error("--drift, --within and --spread need --asleep, such as --asleep 10")
    what = drift if arguments.drift else within if arguments.within else measure
    found = [run(case, arguments.limit, what) for case in cases]
    if arguments.within and not arguments.json:
        for each in found:
            print_within(each)
    elif arguments.json or arguments.drift:
        print(json.dumps({"torch": torch.__version__, "rounds": arguments.rounds, "cases": found}))
    else:
        for each in found:
            print_table(each)


def print_table(found: dict[str, Any]) -> None:
    print(f"\n{found['ranks']} ranks on {found['device']}, d={found['dim']}, torch {torch.__version__}\n")
    spreads = {name: f"{min(each):.3f} to {max(each):.3f}" for name, each in found["predicted_over_measured"].items()}
    if "step_ms" not in found:
        print("| | predicted / measured bytes, of ranks |")
        print("| --- | --- |")
        for name, spread in spreads.items():
            print(f"| {name} | {spread} |")
        return
    print("| | step, ms | action, ms | planned / measured | bytes, of ranks | auto / it | with tries |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, step in found["step_ms"].items():
        auto = found["auto_over"].get(name)
        both = f"{auto:.2f} | {found['auto_with_tries_over'][name]:.2f}" if auto is not None else "|"
        planned, spread = found["planned_over_measured"][name], spreads.get(name, "")
        print(f"| {name} | {step:.1f} | {found['action_ms'][name]:.2f} | {planned:.2f} | {spread} | {both} |")
    print("\n" + "\n".join(found["story"]))


if __name__ == "__main__":
    main()
