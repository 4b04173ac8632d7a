"""``sternway demo --chaos``: kill processes during training, resume, and compare the weights with a run undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sternway.cli._progress import MovingBar, moving_bar
from sternway.cli._table import TableColumn, show_table, stdout

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
    with moving_bar(as_json, "starting the processes") as bar:
        calm, disturbed = train_with_kills(options, ranks=ranks, kills=kills, heed=_Watch(bar, steps))
    if as_json:
        typer.echo(json.dumps(_record(calm, disturbed)))
    else:
        _show(calm, disturbed)
    if calm.weights != disturbed.weights:
        raise typer.Exit(1)


class _Watch:
    """Turns the notes of both runs into a bar, and a line for each kill and each return."""

    def __init__(self, bar: MovingBar, steps: int) -> None:
        self._bar, self._steps, self._before, self._killed = bar, steps, 0, 0.0

    def __call__(self, note: dict[str, Any]) -> None:
        run = "with kills" if self._before else "undisturbed"
        if note["kind"] == "step":
            done, total = self._before + note["step"] + 1, 2 * self._steps
            self._bar.update(done, total, f"{run}: loss {note['loss']:.3f}")
        elif note["kind"] == "kill":
            self._killed = note["time"]
            self._bar.say(f"rank {note['rank']} killed in step {note['step']}")
        elif note["kind"] == "life" and self._killed:
            self._bar.say(f"back after {note['time'] - self._killed:.1f} s: resumed at step {note['resumed']}")
        elif note["kind"] == "done":
            self._before, self._killed = self._steps, 0.0


def _show(calm: ChaosLog, disturbed: ChaosLog) -> None:
    columns = [TableColumn(name, right=name != "then") for name in ("life", "resumed at step", "steps done", "then")]
    columns.append(TableColumn("back after", drop=1))
    rows = []
    lives, kills = disturbed.of("life"), disturbed.of("kill")
    for place, life in enumerate(lives):
        kill = kills[place] if place < len(kills) else None
        end = lives[place + 1]["time"] if place + 1 < len(lives) else float("inf")
        done = sum(life["time"] <= note["time"] < end for note in disturbed.of("step"))
        rows.append(
            (
                str(place + 1),
                str(life["resumed"]),
                str(done),
                f"rank {kill['rank']} killed in step {kill['step']}" if kill else "done",
                f"{end - kill['time']:.1f} s" if kill else "",
            )
        )
    show_table(columns, rows, title="Training under torchrun --max-restarts, a process killed in the middle of a step")
    console = stdout()
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
