"""``sternway split``: one GPT stage's backward, whole and in halves, beside torch's own split."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from sternway._bytes import show_bytes
from sternway.cli._progress import moving_bar
from sternway.cli._table import TableColumn, show_table, stdout

if TYPE_CHECKING:
    from sternway.demo import SplitTimes

TOLERANCE = 1e-4  # relative, between our gradients and plain autograd's


def split(
    dim: Annotated[int, typer.Option(min=8, help="Width of the GPT; a multiple of 4.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Number of times each backward is timed.")] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Split a small GPT's backward: times and memory beside torch's split, gradients against plain autograd's."""
    if dim % 4:
        raise typer.BadParameter(f"must be a multiple of 4, the number of heads; got {dim}", param_hint="--dim")
    import torch

    from sternway.demo import GPT, ThreeWays

    torch.manual_seed(0)
    torch.set_num_threads(1)
    gpt = GPT(vocabulary=256, dim=dim, heads=4, layers=layers, length=64)
    stage = ThreeWays(gpt.blocks, torch.randn(2, 64, dim))
    with moving_bar(as_json, "comparing gradients") as bar:
        error = stage.worst_error()
        done, total = count(1), rounds * len(stage.ways)
        times = stage.time(rounds, progress=lambda: bar.update(next(done), total, "timing the splits"))
    held = {name: stage.held(name) for name in ("torch", "sternway")}
    if as_json:
        typer.echo(json.dumps(_record(dim, layers, error, times, held)))
    else:
        _show(f"{layers} GPT blocks, d={dim}, 2 × 64 tokens, one CPU thread, torch {torch.__version__}", times, held)
        good = "[green]equal[/green]" if error < TOLERANCE else "[red]NOT equal[/red]"
        stdout().print(f"Gradients {good} to plain autograd's: largest relative difference {error:.1e}.")
    if not error < TOLERANCE:
        raise typer.Exit(1)


def _show(title: str, times: dict[str, SplitTimes], held: dict[str, tuple[int, int]]) -> None:
    columns = (
        TableColumn("backward", right=False),
        TableColumn("I, ms", drop=2),
        TableColumn("W, ms", drop=1),
        TableColumn("I + W"),
        TableColumn("fused"),
        TableColumn("over fused"),
        TableColumn("held after F", drop=3),
        TableColumn("held after I", drop=4),
    )
    rows = []
    for name, (after_forward, after_i) in held.items():
        exact = times[name]
        mine = replace(exact, i=round(exact.i, 2), w=round(exact.w, 2), fused=round(exact.fused, 2))  # as shown
        shown = (mine.i, mine.w, mine.i + mine.w, mine.fused, over_fused(mine))
        rows.append((name, *(f"{value:.2f}" for value in shown), show_bytes(after_forward), show_bytes(after_i)))
    show_table(columns, rows, title=title, styles=["", "bold"])
    text = "Each split ran in turn with a fused backward, whose time is beside it. I + W over fused: smaller is better."
    stdout().print(text, style="dim", highlight=False)


def over_fused(times: SplitTimes) -> float:
    """How long both halves take, over how long the fused backward takes."""
    return (times.i + times.w) / max(times.fused, 0.01)  # of a backward too short to show


def _record(
    dim: int, layers: int, error: float, times: dict[str, SplitTimes], held: dict[str, tuple[int, int]]
) -> dict[str, object]:
    import torch

    return {
        "torch": torch.__version__,
        "dim": dim,
        "layers": layers,
        "largest_relative_difference": error,
        "gradients_equal": error < TOLERANCE,
        "fused_ms": times["fused"].i,
        **{
            name: {
                "i_ms": times[name].i,
                "w_ms": times[name].w,
                "fused_ms": times[name].fused,
                "over_fused": over_fused(times[name]),
                "held_after_f": held[name][0],
                "held_after_i": held[name][1],
            }
            for name in held
        },
    }
