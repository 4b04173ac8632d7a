"""``sternway demo --chaos``: kill processes during training, resume, and compare the weights with a run undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sternway.demo import ChaosLog


def show_chaos(
    ranks: int, steps: int, dim: int, layers: int, microbatches: int, out: Path, kills: int, as_json: bool, device: str
) -> None:
    """Run it and print what happened; exit 1 if the weights differ."""
    from sternway.demo import ChaosOptions, train_with_kills

    options = ChaosOptions(
        folder=str(out), steps=steps, dim=dim, layers=layers, microbatches=microbatches, device=device
    )
    with Console(stderr=True).status("training twice, the second time killing processes", spinner="dots"):
        calm, disturbed = train_with_kills(options, ranks=ranks, kills=kills)
    if as_json:
        typer.echo(json.dumps(_record(calm, disturbed)))
    else:
        _show(calm, disturbed)
    if calm.weights != disturbed.weights:
        raise typer.Exit(1)


def _show(calm: ChaosLog, disturbed: ChaosLog) -> None:
    console = Console()
    table = Table(title="Training under torchrun --max-restarts, a process killed in the middle of a step")
    for heading in ("life", "resumed at step", "steps done", "then", "back after"):
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
    good = "[green]bit-identical[/green]" if calm.weights == disturbed.weights else "[red]NOT identical[/red]"
    console.print(f"Weights {good} to those of a run without kills ({calm.weights[:16]}…).")
    first, second = (log.of("step")[-1]["loss"] for log in (calm, disturbed))
    console.print(f"Last loss {first:.4f} without kills, {second:.4f} with {len(kills)}.")


def _record(calm: ChaosLog, disturbed: ChaosLog) -> dict[str, object]:
    return {
        "kills": len(disturbed.of("kill")),
        "lives": [{key: life[key] for key in ("number", "resumed")} for life in disturbed.of("life")],
        "bit_identical": calm.weights == disturbed.weights,
        "weights": disturbed.weights,
        "last_loss": disturbed.of("step")[-1]["loss"],
        "seconds": {"calm": calm.seconds, "chaos": disturbed.seconds},
    }
