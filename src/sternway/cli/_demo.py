"""``sternway demo``: train a small GPT across local processes, and compare with torch.distributed.pipelining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sternway.cli._chaos import show_chaos
from sternway.cli._exit import usage
from sternway.cli._progress import moving_bar
from sternway.cli._table import TableColumn, show_table, stdout

if TYPE_CHECKING:
    from sternway.demo import DemoOptions, DemoOutcome


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes: each with a GPU, or with one thread.")] = 2,
    device: Annotated[
        str, typer.Option(help='"cuda", "cpu", or "auto": GPUs, if there is one for each process.')
    ] = "auto",
    schedule: Annotated[
        str, typer.Option(help='A schedule by name, as sternway plan lists them, or "auto" for the fastest.')
    ] = "auto",
    steps: Annotated[int, typer.Option(min=2, help="Number of training steps.")] = 40,
    dim: Annotated[int, typer.Option(min=8, help="Width of the GPT; a multiple of 4.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Number of microbatches in a batch.")] = 8,
    compared_steps: Annotated[int, typer.Option(min=1, help="Number of steps timed for each schedule.")] = 6,
    out: Annotated[Path, typer.Option(help="Folder for report.html.")] = Path("demo"),
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Instead, kill processes during training, and resume.")
    ] = False,
    kills: Annotated[int, typer.Option(min=1, max=20, help="Number of processes to kill, with --chaos.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Train a byte-level GPT on Python's own source across local processes, and compare with torch's schedules."""
    if dim % 4:
        raise typer.BadParameter(f"must be a multiple of 4, the number of heads; got {dim}", param_hint="--dim")
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"must be auto, cpu or cuda; got {device}", param_hint="--device")
    from sternway.demo import DemoOptions, choose_device, write_report
    from sternway.schedule import make

    with usage():
        if schedule != "auto":
            make(schedule, ranks=ranks, microbatches=microbatches)
        device, remark = choose_device(device, ranks)
    if remark:
        typer.echo(remark, err=True)
    if chaos:
        show_chaos(ranks, steps, dim, layers, microbatches, out, kills, as_json, device)
        return
    options = DemoOptions(
        ranks=ranks,
        schedule=schedule,
        steps=steps,
        dim=dim,
        layers=layers,
        microbatches=microbatches,
        compared_steps=compared_steps,
        device=device,
    )
    outcome = _train(options, quiet=as_json)
    report = write_report(out, options, outcome)
    if as_json:
        typer.echo(json.dumps(_record(options, outcome, report)))
    else:
        _show(options, outcome, report)
    if not outcome.gradients_equal:
        raise typer.Exit(1)


def _train(options: DemoOptions, *, quiet: bool) -> DemoOutcome:
    from sternway.demo import train

    with moving_bar(quiet) as bar:
        return train(options, bar.update)


def _show(options: DemoOptions, outcome: DemoOutcome, report: Path) -> None:
    columns = (
        TableColumn("step by", right=False),
        TableColumn("ms"),
        TableColumn("efficiency"),
        TableColumn("bubble measured", drop=2),
        TableColumn("planned", drop=3),
        TableColumn("peak memory", drop=1),
    )
    efficiency = outcome.efficiency(options.ranks)
    rows = [("one process", f"{1e3 * outcome.one_process:.4g}", "", "", "", "")]
    for name, seconds in outcome.seconds.items():
        ours = name.startswith("sternway")
        rows.append(
            (
                name,
                f"{1e3 * seconds:.4g}",
                f"{efficiency[name]:.2f}",
                f"{outcome.measured_bubble:.1%}" if ours else "",
                f"{outcome.planned_bubble:.1%}" if ours else "",
                f"{outcome.peaks[name] / 2**20:.0f} MiB" if outcome.peaks[name] else "",
            )
        )
    show_table(
        columns,
        rows,
        title=f"{options.layers}-block GPT, d={options.dim}, {options.microbatches} microbatches of "
        f"{options.rows} × {options.length} bytes, {options.ranks} processes"
        f"{', one thread each' if options.device == 'cpu' else ' on GPUs'}",
        styles=["bold" if name.startswith("sternway") else "" for name, *_ in rows],
    )
    console = stdout()
    good = "[green]equal[/green]" if outcome.gradients_equal else "[red]NOT equal[/red]"
    console.print(
        f"First step's gradients {good} to one process's: largest relative difference {outcome.gradient_error:.1e}."
    )
    console.print(f"Loss {outcome.losses[0]:.3f} → {outcome.losses[-1]:.3f} in {options.steps} steps.")
    console.print(f"Report: {report}", soft_wrap=True)


def _record(options: DemoOptions, outcome: DemoOutcome, report: Path) -> dict[str, object]:
    import torch

    return {
        "torch": torch.__version__,
        "ranks": options.ranks,
        "device": options.device,
        "schedule": outcome.schedule_name,
        "steps": options.steps,
        "losses": outcome.losses,
        "gradients_equal": outcome.gradients_equal,
        "largest_relative_difference": outcome.gradient_error,
        "one_process_ms": 1e3 * outcome.one_process,
        "step_ms": {name: 1e3 * seconds for name, seconds in outcome.seconds.items()},
        "efficiency": outcome.efficiency(options.ranks),
        "bubble_planned": outcome.planned_bubble,
        "bubble_measured": outcome.measured_bubble,
        "peak_bytes": outcome.peaks,
        "report": str(report),
    }
