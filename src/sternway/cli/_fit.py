"""``sternway fit``: how much memory each rank of a pipeline will need, before it is launched."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sternway._bytes import show_bytes
from sternway.cli._exit import MisuseError
from sternway.cli._graph import _failed, function_of
from sternway.cli._progress import moving_bar
from sternway.errors import SternwayError

if TYPE_CHECKING:
    from sternway.pipeline import Fit, Way

KINDS = ("parameters", "gradients", "optimizer", "activations", "working", "total")


def fit(
    target: Annotated[str, typer.Argument(help="path/to/file.py:function, which returns a model and one microbatch.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline.")],
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")],
    memory: Annotated[str, typer.Option(help="What each rank has, such as 80GB.")] = "",
    schedule: Annotated[str, typer.Option(help="A schedule by name; all are tried by default.")] = "",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, momentum, sgd or none.")] = "adamw",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say how much memory each rank will need, by kind, for each schedule; needs no GPU and makes no weights.

    The exit code is 1 if no schedule fits.
    """
    from sternway import pipeline

    function = function_of(target)

    begun = False

    def build() -> Any:
        nonlocal begun
        begun = True
        try:
            return function()
        except SternwayError:
            raise
        except Exception as error:
            raise _failed(f"{target} could not be called on tensors without memory", error) from error

    try:
        with moving_bar(as_json, "running a step without memory"):
            found = pipeline.fit(
                build,
                ranks=ranks,
                n_microbatches=microbatches,
                memory=memory or None,
                schedule=schedule or None,
                optimizer=optimizer,
            )
    except SternwayError as error:
        if begun:
            raise
        raise MisuseError(error.rule, got=error.got, fix=error.fix) from error
    if as_json:
        typer.echo(json.dumps(_as_dict(found)))
    else:
        _show(found)
    if found.best is None:
        raise typer.Exit(1)


def _show(found: Fit) -> None:
    console = Console()
    shown = found.best or min(found.ways, key=lambda way: way.peak)
    console.print(f"{found.parameters:,} parameters, by {shown}:", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in ("rank", "stages", *KINDS):
        table.add_column(name, justify="right")
    for rank, each in enumerate(shown.ranks):
        sizes = (show_bytes(getattr(each, kind)) for kind in KINDS)
        table.add_row(str(rank), ", ".join(map(str, each.stages)), *sizes)
    console.print(table)
    console.print("\nTime of a step, over that of the same work without idle time:")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("schedule", "fullest rank", "time", ""):
        table.add_column(name, justify="left" if name in ("schedule", "") else "right")
    for way in found.ways:
        table.add_row(str(way), show_bytes(way.peak), f"{way.time:.2f}", "" if found.fits(way) else "too large")
    console.print(table)
    console.print(f"\n{found.verdict}", highlight=False)


def _as_dict(found: Fit) -> dict[str, Any]:
    def each(way: Way) -> dict[str, Any]:
        return {
            "schedule": way.schedule.name,
            "recompute": way.recompute,
            "time": way.time,
            "peak": way.peak,
            "fits": found.fits(way),
            "ranks": [dataclasses.asdict(rank) | {"total": rank.total} for rank in way.ranks],
        }

    return {
        "parameters": found.parameters,
        "limit": found.limit,
        "verdict": found.verdict,
        "ways": [each(way) for way in found.ways],
    }
