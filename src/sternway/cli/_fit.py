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

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "working", "total")
_COPIES = ("dp", "dp_replicate")


def fit(
    target: Annotated[str, typer.Argument(help="path/to/file.py:function, which returns a model and one microbatch.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of the pipeline; or pp in --mesh.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Microbatches of a step; by default four for each rank.")
    ] = None,
    mesh: Annotated[str, typer.Option(help="Sizes by dimension, such as pp=8,dp_shard=2; dp for copies.")] = "",
    gathered: Annotated[int | None, typer.Option(min=1, help="Sharded stages that a rank keeps gathered.")] = None,
    memory: Annotated[str, typer.Option(help="What each rank has, such as 80GB.")] = "",
    schedule: Annotated[str, typer.Option(help="A schedule by name; all are tried by default.")] = "",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, momentum, sgd or none.")] = "adamw",
    device: Annotated[str, typer.Option(help="Where the ranks will be: cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say how much memory each rank will need, by kind, for each schedule; needs no GPU and makes no weights.

    The exit code is 1 if no schedule fits.
    """
    from sternway import pipeline

    function = function_of(target)
    count, shards = _sizes(ranks, mesh)

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
                ranks=count,
                n_microbatches=microbatches or 4 * count,
                memory=memory or None,
                schedule=schedule or None,
                optimizer=optimizer,
                shards=shards,
                gathered=gathered,
                what_if=True,
                device=device,
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


def _sizes(ranks: int | None, mesh: str) -> tuple[int, int]:
    """The ranks of the pipeline, and the shards of each stage."""
    dims: dict[str, int] = {}
    for each in filter(None, mesh.split(",")):
        name, _, size = each.partition("=")
        if not size.isdecimal() or not int(size) or name in dims:
            raise MisuseError("--mesh must be sizes by dimension", got=each, fix="pass --mesh pp=8,dp_shard=2")
        dims[name] = int(size)
    other = next((name for name in dims if name not in ("pp", "dp_shard", *_COPIES)), None)
    if other is not None:
        raise MisuseError(
            "--mesh must have dimensions of which it is known what they divide: pp, dp_shard, dp and dp_replicate",
            got=f"{other}={dims[other]}; a plain model does not say which weights and activations that divides",
            fix=f"return one shard of the model along {other} (fewer heads, a narrower MLP), and leave {other} out",
        )
    if ranks is None and "pp" not in dims:
        raise MisuseError("the ranks of the pipeline must be given", got="none", fix="pass --ranks 8, or --mesh pp=8")
    count = ranks or dims["pp"]
    if dims.get("pp", count) != count:
        raise MisuseError(
            "--ranks and pp in --mesh must be the same", got=f"{ranks} and {dims['pp']}", fix="pass one of them"
        )
    return count, dims.get("dp_shard", 1)


def _show(found: Fit) -> None:
    console = Console()
    shown = found.shown
    many = shown.schedule.n_microbatches
    console.print(f"{found.parameters:,} parameters, {many} microbatches, by {shown}:", highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    kinds = [kind for kind in KINDS if kind != "gathered" or any(each.gathered for each in shown.ranks)]
    for name in ("rank", "stages", *kinds):
        table.add_column(name, justify="right")
    for rank, each in enumerate(shown.ranks):
        sizes = (show_bytes(getattr(each, kind)) for kind in kinds)
        table.add_row(str(rank), ", ".join(map(str, each.stages)), *sizes)
    console.print(table)
    _show_tensors(console, found)
    console.print("\nTime of a step, over that of the same work without idle time:")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("schedule", "fullest rank", "time", ""):
        table.add_column(name, justify="left" if name in ("schedule", "") else "right")
    for way in found.ways:
        table.add_row(str(way), show_bytes(way.peak), f"{way.time:.2f}", "" if found.fits(way) else "too large")
    console.print(table)
    for what, way in found.changes.items():
        text = f"With {what}: {way} needs {show_bytes(way.peak)} on the fullest rank, time {way.time:.2f}."
        console.print(f"\n{text}" if way is next(iter(found.changes.values())) else text, highlight=False)
    console.print(f"\n{found.verdict}", highlight=False)


def _show_tensors(console: Console, found: Fit) -> None:
    """The largest parameters, and the largest tensors that a microbatch keeps on the fullest rank."""
    console.print("\nThe largest parameters, and what one microbatch keeps on the fullest rank:")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("tensor", "shape", "dtype", "bytes", "how many"):
        table.add_column(name, justify="right" if name in ("bytes", "how many") else "left")
    for each in (*found.largest, *found.shown.kept):
        shape = " × ".join(map(str, each.shape))
        table.add_row(each.what, shape, each.dtype, show_bytes(each.nbytes), str(each.count))
    console.print(table)


def _as_dict(found: Fit) -> dict[str, Any]:
    def each(way: Way) -> dict[str, Any]:
        return {
            "schedule": way.schedule.name,
            "recompute": way.recompute,
            "moved": way.moved,
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
        "largest": [dataclasses.asdict(tensor) for tensor in (*found.largest, *found.shown.kept)],
        "changes": {what: each(way) for what, way in found.changes.items()},
    }
