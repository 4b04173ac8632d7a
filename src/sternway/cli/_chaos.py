"""``sternway demo --chaos``: lose processes in the middle of training, and end with the same bits all the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sternway.cli import _chaos_rank
from sternway.cli._chaos_rank import Options
from sternway.errors import PipelineError

SAVE_EVERY = 4


@dataclass(frozen=True, slots=True)
class Story:
    """What happened in one run, as its processes noted it."""

    notes: list[dict[str, Any]]
    seconds: float

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def weights(self) -> str:
        return str(self.of("done")[-1]["weights"]) if self.of("done") else ""


def chaos(
    ranks: int, steps: int, dim: int, layers: int, microbatches: int, out: Path, kills: int
) -> tuple[Story, Story]:
    """Train twice under torchrun, undisturbed and with ranks killed; what happened in each.

    Raises:
        PipelineError: a run that did not come to its end, or a folder that cannot be written to.
    """
    chance = random.Random(0)
    last = steps - 2
    moments = sorted(chance.sample(range(1, max(2, last)), min(kills, max(1, last - 1))))
    base = Options(
        folder="",
        steps=steps,
        dim=dim,
        layers=layers,
        microbatches=microbatches,
        save_every=SAVE_EVERY,
        kills=(),
    )
    struck = tuple((step, chance.randrange(ranks)) for step in moments)
    calm = _run(replace(base, folder=str(out / "calm")), ranks)
    return calm, _run(replace(base, folder=str(out / "chaos"), kills=struck), ranks)


def _run(options: Options, ranks: int) -> Story:
    folder = Path(options.folder)
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise PipelineError("--out is a folder to write into", got=str(error), fix="choose another") from None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(len(options.kills) + 1), _chaos_rank.__file__, options.to_json()]
    start = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a new life finds the addresses of the one before
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False)
    notes = folder / "notes.jsonl"
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    if done.returncode:
        raise PipelineError(
            "training comes to its end, though processes are killed",
            got=f"exit {done.returncode}: {done.stderr.decode(errors='replace')[-800:]}",
            fix="see the reports in " + str(folder / "reports"),
        )
    return Story([json.loads(line) for line in lines], time.monotonic() - start)


def show(calm: Story, disturbed: Story) -> None:
    """A table of the lives, and whether the ends are the same."""
    console = Console()
    table = Table(title="Training under torchrun --max-restarts, a process killed in the middle of a step")
    for heading in ("life", "went on from step", "steps done", "then", "back after"):
        table.add_column(heading, justify="left" if heading == "then" else "right")
    lives, kills = disturbed.of("life"), disturbed.of("kill")
    for place, life in enumerate(lives):
        kill = kills[place] if place < len(kills) else None
        end = lives[place + 1]["time"] if place + 1 < len(lives) else float("inf")
        done = sum(life["time"] <= note["time"] < end for note in disturbed.of("step"))
        table.add_row(
            str(place + 1),
            str(life["resumed"]),
            str(done),
            f"rank {kill['rank']} killed in step {kill['step']}" if kill else "done",
            f"{end - kill['time']:.1f} s" if kill else "",
        )
    console.print(table)
    same = calm.weights == disturbed.weights
    losses = [{note["step"]: note["loss"] for note in story.of("step")} for story in (calm, disturbed)]
    good = "[green]bit-identical[/green]" if same else "[red]NOT identical[/red]"
    console.print(f"Weights {good} to those of a run that nobody disturbed ({calm.weights[:16]}…).")
    steps = [max(found) for found in losses]
    console.print(
        f"Last loss {losses[0][steps[0]]:.4f} undisturbed, {losses[1][steps[1]]:.4f} with {len(kills)} kills."
    )


def record(calm: Story, disturbed: Story) -> dict[str, object]:
    """What ``--json`` prints."""
    return {
        "kills": len(disturbed.of("kill")),
        "lives": [{key: life[key] for key in ("number", "resumed")} for life in disturbed.of("life")],
        "bit_identical": calm.weights == disturbed.weights,
        "weights": disturbed.weights,
        "last_loss": disturbed.of("step")[-1]["loss"],
        "seconds": {"calm": calm.seconds, "chaos": disturbed.seconds},
    }
