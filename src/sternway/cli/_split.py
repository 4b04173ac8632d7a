"""``sternway split``: one GPT stage's backward, whole and in halves, beside torch's own split."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from sternway.demo import SplitTimes

TOLERANCE = 1e-4  # relative, between our gradients and plain autograd's
MIB = 2**20


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
    error = stage.worst_error()
    with Progress(console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("Timing fused, torch's split and ours", total=rounds * len(stage.ways))
        times = stage.time(rounds, progress=lambda: bar.advance(task))
    held = {name: stage.held(name) for name in ("torch", "sternway")}
    if as_json:
        typer.echo(json.dumps(_record(dim, layers, error, times, held)))
    else:
        _show(f"{layers} GPT blocks, d={dim}, 2 × 64 tokens, one CPU thread, torch {torch.__version__}", times, held)
        good = "[green]equal[/green]" if error < TOLERANCE else "[red]NOT equal[/red]"
        Console().print(f"Gradients {good} to plain autograd's: largest relative difference {error:.1e}.")
    if not error < TOLERANCE:
        raise typer.Exit(1)


def _show(title: str, times: dict[str, SplitTimes], held: dict[str, tuple[int, int]]) -> None:
    table = Table(title=title)
    for heading in ("backward", "I, ms", "W, ms", "I + W", "over fused", "held after F", "held after I"):
        table.add_column(heading, justify="left" if heading == "backward" else "right")
    table.add_row("fused", "", "", f"{times['fused'].i:.2f}", "1.00", "", "")
    for name, label in (("torch", "torch"), ("sternway", "[bold]sternway[/bold]")):
        mine, (after_forward, after_i) = times[name], held[name]
        table.add_row(
            label,
            f"{mine.i:.2f}",
            f"{mine.w:.2f}",
            f"{mine.i + mine.w:.2f}",
            f"{mine.ratio:.2f}",
            f"{after_forward / MIB:.1f} MiB",
            f"{after_i / MIB:.1f} MiB",
        )
    Console().print(table)


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
                "over_fused": times[name].ratio,
                "held_after_f": held[name][0],
                "held_after_i": held[name][1],
            }
            for name in held
        },
    }
