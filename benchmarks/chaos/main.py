"""Train on four processes and lose one of them, again and again; does training come out the same?

    python benchmarks/chaos/main.py [--kills 100] [--seed 0] [--json]

Each life of the run trains on from the last checkpoint until one rank is killed (SIGKILL), stopped (SIGSTOP), raises an
exception, or has its connections cut, at a random moment of a step or of a save. Counted are lives in which some other
rank did not report that within a minute (hangs), checkpoints that had been reported as saved and were not found whole
afterwards, and the time from the fault to the last other rank's report. At the end the weights are compared with those
of a run that nobody disturbed, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from chaos.fault import KINDS, LEADER_ONLY, SAVE_PHASES, STEP_PHASES, Fault
from chaos.lives import Life, Run, live, newest


def choose(chance: random.Random, run: Run, resumed: int) -> Fault:
    """A fault within the next steps."""
    phase = chance.choice(STEP_PHASES + SAVE_PHASES)
    rank = 0 if phase in LEADER_ONLY else chance.randrange(run.ranks)
    step = min(resumed + chance.randrange(2 * run.save_every), run.steps - run.save_every)
    return Fault(chance.choice(KINDS), rank, step, phase)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, and nothing else on stdout"
    )
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "disturbed", steps=2 * arguments.kills + 8)
        calm = live(replace(run, directory=Path(folder) / "calm"), None, limit=600)
        if not calm.weights:
            print(f"the undisturbed run failed: {calm}", file=sys.stderr)
            return 1
        lives: list[tuple[Fault, Life]] = []
        lost = 0
        while sum(life.died is not None for _, life in lives) < arguments.kills:
            fault = choose(chance, run, max(0, newest(run.directory)))
            life = live(run, fault)
            found = newest(run.directory)
            lost += found < life.saved
            lives.append((fault, life))
            seconds = life.seconds_to_report
            print(
                f"{len(lives):4} {fault.kind:9} rank {fault.rank}, {fault.phase:21} step {fault.step:4}: "
                f"{'no fault' if life.died is None else f'{seconds:.2f} s' if seconds is not None else 'no report'}, "
                f"checkpoint {found}"
                + (f", HUNG {life.hung}" if life.hung else "")
                + (f", LOST {life.saved}" if found < life.saved else ""),
                file=sys.stderr,
                flush=True,
            )
            if arguments.kills and life.weights:
                break  # it came to its end between faults
        last = live(run, None, limit=600)
        record = summary(lives, lost, last.weights == calm.weights, time.monotonic() - start)
    if not arguments.json:
        show(lives, record)
    print(json.dumps(record))
    return 0 if record["hangs"] == 0 and lost == 0 and record["bit_identical"] else 1


def summary(lives: list[tuple[Fault, Life]], lost: int, identical: bool, seconds: float) -> dict[str, object]:
    struck = [(fault, life) for fault, life in lives if life.died is not None]
    times = {
        kind: [s for f, life in struck if f.kind == kind and (s := life.seconds_to_report) is not None]
        for kind in KINDS
    }
    every = sorted(s for values in times.values() for s in values)
    return {
        "kills": len(struck),
        "hangs": sum(bool(life.hung) for _, life in struck),
        "lost_checkpoints": lost,
        "bit_identical": identical,
        "seconds_to_report": {
            "median": round(statistics.median(every), 3) if every else None,
            "largest": round(every[-1], 3) if every else None,
            **{kind: round(statistics.median(values), 3) for kind, values in times.items() if values},
        },
        "kinds": dict(Counter(fault.kind for fault, _ in struck)),
        "phases": dict(Counter(fault.phase for fault, _ in struck)),
        "ranks": 4,
        "heartbeat_timeout": Run(Path(), 0).heartbeat_timeout,
        "seconds": round(seconds),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def show(lives: list[tuple[Fault, Life]], record: dict[str, object]) -> None:
    print("| phase | " + " | ".join(KINDS) + " |\n" + "| --- " * (len(KINDS) + 1) + "|")
    for phase in STEP_PHASES + SAVE_PHASES:
        cells = []
        for kind in KINDS:
            times = [
                s
                for fault, life in lives
                if (fault.phase, fault.kind) == (phase, kind) and (s := life.seconds_to_report) is not None
            ]
            cells.append(f"{len(times)}: {statistics.median(times):.2f} s" if times else "")
        print(f"| {phase} | " + " | ".join(cells) + " |")
    print()


if __name__ == "__main__":
    sys.exit(main())
