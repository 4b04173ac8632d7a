"""``sternway demo``: train a small GPT across local processes, and compare with torch.distributed.pipelining."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sternway import viewer
from sternway.cli import _chaos as chaos_run
from sternway.cli._demo_rank import Options, Outcome, run
from sternway.errors import PipelineError
from sternway.schedule import Timeline

TOLERANCE = 1e-3  # relative, between the pipeline's gradients and one process's


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="How many processes, with one thread each.")] = 2,
    schedule: Annotated[str, typer.Option(help='"auto", or the name of a schedule; see sternway plan.')] = "auto",
    steps: Annotated[int, typer.Option(min=2, help="How many training steps.")] = 30,
    dim: Annotated[int, typer.Option(min=8, help="Width of the GPT; a multiple of 4.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks.")] = 8,
    microbatches: Annotated[int, typer.Option(min=1, help="Into how many pieces a batch is cut.")] = 8,
    compared_steps: Annotated[int, typer.Option(min=1, help="Steps timed for each of torch's schedules.")] = 6,
    out: Annotated[Path, typer.Option(help="The folder for report.html.")] = Path("demo"),
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill processes while training goes on, instead.")] = False,
    kills: Annotated[int, typer.Option(min=1, max=20, help="How many, with --chaos.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Train a byte-level GPT on Python's own source, across local processes, beside torch's schedules."""
    if dim % 4:
        raise typer.BadParameter(f"a multiple of 4 is needed (there are 4 heads); got {dim}", param_hint="--dim")
    if chaos:
        _chaos(ranks, steps, dim, layers, microbatches, out, kills, as_json)
        return
    options = Options(
        ranks=ranks,
        schedule=schedule,
        steps=steps,
        dim=dim,
        layers=layers,
        microbatches=microbatches,
        compared_steps=compared_steps,
    )
    outcome = _train(options, quiet=as_json)
    report = _write_report(out, options, outcome)
    if as_json:
        typer.echo(json.dumps(_record(options, outcome, report)))
    else:
        _show(options, outcome, report)
    if not outcome.gradient_error < TOLERANCE:
        raise typer.Exit(1)


def _chaos(
    ranks: int, steps: int, dim: int, layers: int, microbatches: int, out: Path, kills: int, as_json: bool
) -> None:
    console = Console(stderr=True)
    with console.status("training twice, and killing a process now and then", spinner="dots"):
        calm, disturbed = chaos_run.chaos(ranks, steps, dim, layers, microbatches, out, kills)
    if as_json:
        typer.echo(json.dumps(chaos_run.record(calm, disturbed)))
    else:
        chaos_run.show(calm, disturbed)
    if calm.weights != disturbed.weights:
        raise typer.Exit(1)


def _train(options: Options, *, quiet: bool) -> Outcome:
    """Start the processes and follow them; the first rank's outcome."""
    context: Any = torch.multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=run, args=(rank, port, options, reports), daemon=True) for rank in range(options.ranks)
    ]
    for process in processes:
        process.start()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task("starting", total=options.steps)
            while True:
                kind, *values = _next_report(reports, processes)
                if kind == "step":
                    step, loss, speed = values
                    bar.update(task, completed=step, description=f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                elif kind == "phase":
                    bar.update(task, description=values[0])
                elif kind == "error":
                    raise PipelineError("every process of the demo finishes", got=values[0], fix="see above")
                else:
                    outcome: Outcome = values[0]
                    return outcome
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _next_report(reports: Any, processes: list[Any]) -> tuple[Any, ...]:
    """The next report; an error if there will be none."""
    while reports.empty():
        if all(not process.is_alive() for process in processes):
            raise PipelineError("the first process reports", got="nothing: all have ended", fix="see what they printed")
        processes[0].join(timeout=0.05)
    report: tuple[Any, ...] = reports.get()
    return report


def _efficiency(options: Options, outcome: Outcome, seconds: float) -> float:
    return outcome.one_process / (options.ranks * seconds)


def _show(options: Options, outcome: Outcome, report: Path) -> None:
    console = Console()
    table = Table(
        title=f"{options.layers}-block GPT, d={options.dim}, {options.microbatches} microbatches of "
        f"{options.rows} × {options.length} bytes, {options.ranks} processes, one thread each"
    )
    for heading in ("step by", "ms", "efficiency", "bubble measured", "planned", "peak memory"):
        table.add_column(heading, justify="left" if heading == "step by" else "right")
    table.add_row("one process", f"{1e3 * outcome.one_process:.0f}", "", "", "", "")
    for name, seconds in outcome.seconds.items():
        ours = name.startswith("sternway")
        table.add_row(
            f"[bold]{name}[/bold]" if ours else name,
            f"{1e3 * seconds:.0f}",
            f"{_efficiency(options, outcome, seconds):.2f}",
            f"{outcome.measured_bubble:.1%}" if ours else "",
            f"{outcome.planned_bubble:.1%}" if ours else "",
            f"{outcome.peaks[name] / 2**20:.0f} MiB" if outcome.peaks[name] else "",
        )
    console.print(table)
    good = "[green]equal[/green]" if outcome.gradient_error < TOLERANCE else "[red]NOT equal[/red]"
    console.print(
        f"First step's gradients {good} to one process's: largest relative difference {outcome.gradient_error:.1e}."
    )
    console.print(f"Loss {outcome.losses[0]:.3f} → {outcome.losses[-1]:.3f} in {options.steps} steps.")
    console.print(f"Report: {report}")


def _record(options: Options, outcome: Outcome, report: Path) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "ranks": options.ranks,
        "schedule": outcome.schedule_name,
        "steps": options.steps,
        "losses": outcome.losses,
        "gradients_equal": outcome.gradient_error < TOLERANCE,
        "largest_relative_difference": outcome.gradient_error,
        "one_process_ms": 1e3 * outcome.one_process,
        "step_ms": {name: 1e3 * seconds for name, seconds in outcome.seconds.items()},
        "efficiency": {name: _efficiency(options, outcome, seconds) for name, seconds in outcome.seconds.items()},
        "bubble_planned": outcome.planned_bubble,
        "bubble_measured": outcome.measured_bubble,
        "peak_bytes": outcome.peaks,
        "report": str(report),
    }


def _write_report(out: Path, options: Options, outcome: Outcome) -> Path:
    """One offline page: the step as planned and as measured, memory, and the loss."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        return viewer.write(
            out / "report.html",
            title=f"{outcome.schedule_name} on {options.ranks} processes",
            timelines={
                "ranks": options.ranks,
                "unit": " ms",
                "series": [
                    {"name": "planned", "events": _events(outcome.planned)},
                    {"name": "measured", "events": _events(outcome.measured)},
                ],
            },
            curves=[
                {
                    "name": "Loss",
                    "x": "step",
                    "y": "loss",
                    "series": [{"name": "loss", "points": [[i, value] for i, value in enumerate(outcome.losses)]}],
                },
                {
                    "name": "Activations kept, in microbatches' forwards of one rank",
                    "x": "ms",
                    "y": "kept",
                    "series": [
                        {"name": f"rank {rank} {way}", "points": _stairs(curve, timeline.makespan)}
                        for way, timeline in (("planned", outcome.planned), ("measured", outcome.measured))
                        for rank, curve in enumerate(timeline.memory)
                    ],
                },
            ],
        )
    except OSError as error:
        raise PipelineError("--out is a folder to write into", got=str(error), fix="choose another") from None


def _stairs(curve: Sequence[tuple[float, float]], end: float) -> list[list[float]]:
    """A memory curve in milliseconds, with the corners of its steps."""
    points: list[list[float]] = []
    for time, level in (*curve, (end, curve[-1][1])):
        points += [[1e3 * time, points[-1][1]]] if points else []
        points.append([1e3 * time, level])
    return points


def _events(timeline: Timeline) -> list[dict[str, Any]]:
    """A timeline's actions as the viewer takes them, in milliseconds."""
    return [
        {
            "rank": event.rank,
            "label": str(event.action),
            "op": action.op,
            "microbatch": action.microbatch,
            "stage": action.stage,
            "start": 1e3 * event.start,
            "end": 1e3 * event.end,
        }
        for rank in timeline.events
        for event in rank
        for action in event.action.actions[-1:]
    ]
