"""``sternway plan``: find the best schedule for given costs and memory, or check one of your own.

sternway plan --ranks 8 --microbatches 24 --costs F=18.5,I=18.1,W=9.3,comm=0.6 --memory 16 --out plan/
sternway plan --ranks 8 --microbatches 24 --memory 40GB --activations 2GB --static 9GB
sternway plan --ranks 8 --microbatches 24 --memory 4 --recompute 0.1 --offload 0.5
sternway plan --check mine.csv --costs F=18.5,I=18.1,W=9.3
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from sternway import schedule
from sternway._bytes import parse_bytes
from sternway.cli._exit import MisuseError, status_of, usage
from sternway.cli._progress import moving_bar
from sternway.cli._table import TableColumn, show_table, stdout
from sternway.errors import ScheduleError, SternwayError, ViewerError
from sternway.schedule import Comparison, Costs, Schedule, Timeline
from sternway.schedule.formats import write_timeline

_FIELDS = ("F", "I", "W", "B", "comm", "comm_busy", "overhead", "receive", "overlap", "spread")


def plan(
    ranks: Annotated[int | None, typer.Option(help="How many ranks the pipeline has.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="How many microbatches a step has.")] = None,
    costs: Annotated[
        str,
        typer.Option(
            help="Times of one microbatch through one rank's share, as F=1,I=1,W=1,comm=0. "
            "B, a whole backward, is I + W unless given; overhead=0.1 is added to every action; "
            "overlap=0.8 says that an overlapped F and B take 0.8 (F + B); spread=0.1, that equal actions "
            "differ by a tenth. "
            "Unequal stages: one number for each, as F=1:1:1.4."
        ),
    ] = "",
    memory: Annotated[
        str | None,
        typer.Option(
            help="How many microbatches' activations a rank may keep; as many as there are ranks unless given. "
            "Or its bytes, as 40GB, with --activations."
        ),
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="What one microbatch's forward keeps on a rank, as 2GB; sternway fit tells.")
    ] = None,
    static: Annotated[
        str | None, typer.Option(help="What a rank holds anyway: parameters, gradients, the optimizer's state.")
    ] = None,
    memory_after_i: Annotated[
        float, typer.Option(help="The fraction of what F kept that is still kept between I and W.")
    ] = 1.0,
    recompute: Annotated[
        float | None,
        typer.Option(
            help="Stages may be recomputed: then F keeps this fraction of what it keeps otherwise, such as 0.1, "
            "and the backward takes F longer. The search chooses the stages."
        ),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=1, help="Of how many equal blocks a stage consists, of which some may be recomputed.")
    ] = 1,
    offload: Annotated[
        float | None,
        typer.Option(
            help="Microbatches may be moved to the host and back: so long takes one move of what F keeps on a rank."
        ),
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Check and time this schedule (.csv or .json) instead.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for CSV, JSON, SVG, trace and HTML; or a file.html, for that alone."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Compare all schedules under a memory limit, search for better ones, and draw the best."""
    try:
        with usage():
            parsed = replace(
                parse_costs(costs, memory_after_i),
                activation_bytes=parse_bytes(activations or 0, "--activations", ScheduleError),
                static_bytes=parse_bytes(static or 0, "--static", ScheduleError),
                memory_input=recompute or 0.0,
                blocks=blocks,
                offload=offload or 0.0,
            )
            limit = _limit(parsed, memory)
        if check is not None:
            result = _check_file(check, parsed, limit, out, quiet=as_json)
        elif ranks is None or microbatches is None:
            raise typer.BadParameter("give --ranks and --microbatches, or --check FILE")
        else:
            most = float(ranks) if limit is None else limit
            compare = partial(
                schedule.compare,
                parsed,
                ranks=ranks,
                microbatches=microbatches,
                memory_limit=most,
                recompute=recompute is not None,
                offload=offload is not None,
            )
            result = _compare(compare, out, quiet=as_json)
    except SternwayError as error:
        if not as_json:
            raise
        _print_json({"ok": False, "error": {"rule": error.rule, "got": error.got, "fix": error.fix}})
        raise typer.Exit(status_of(error)) from None
    if as_json:
        _print_json({"ok": True, **result})


def parse_costs(text: str, memory_after_i: float = 1.0) -> Costs:
    """Parse the costs of the command line.

    Example:
        >>> parse_costs("F=2,W=0.5:0.7").W
        (0.5, 0.7)

    Raises:
        ScheduleError: a name or a number is not valid.
    """
    values: dict[str, Any] = {}
    for item in filter(None, text.replace(" ", "").split(",")):
        name, _, value = item.partition("=")
        if name not in _FIELDS or name in values:
            raise ScheduleError(
                f"costs must be some of {', '.join(_FIELDS)}, each once", got=repr(item), fix="write F=1,I=1,W=1,comm=0"
            )
        try:
            numbers = [float(number) for number in value.split(":")]
        except ValueError:
            raise ScheduleError(
                "a cost must be a number, or one for each stage with colons between",
                got=repr(item),
                fix="write F=1 or F=1:1:1.4",
            ) from None
        values[name] = numbers[0] if len(numbers) == 1 else numbers
    return Costs(**values, memory_after_I=memory_after_i)


def _limit(costs: Costs, memory: str | None) -> float | None:
    """The memory limit in microbatches, from a number of them or from bytes."""
    if memory is None:
        return None
    try:
        return float(memory)
    except ValueError:
        return costs.limit_within(memory)


def _compare(compare: Callable[..., Comparison], out: Path | None, *, quiet: bool) -> dict[str, Any]:
    """Compare schedules, draw and write the best; return what ``--json`` prints."""
    with usage(), moving_bar(quiet, "searching") as bar:
        comparison = compare(progress=lambda done, total: bar.update(done, total, "searching"))
    best = comparison.best
    files = _write(best.timeline, out, comparison.to_html)
    rows = [
        {
            "name": row.name,
            "bubble_rate": row.bubble_rate,
            "period": row.period,
            "makespan": row.makespan,
            "peak_memory": row.peak_memory,
            "peak_bytes": row.peak_bytes,
            "gap": row.gap if row.fits else None,
            "fits": row.fits,
            "recompute": list(row.schedule.recompute),
            "offloaded": [len(row.schedule.moved(rank)) for rank in range(comparison.ranks)],
        }
        for row in comparison.rows
    ]
    if not quiet:
        _print_table(comparison)
        stdout().print(comparison.verdict, highlight=False, markup=False, soft_wrap=True)
        for name, reason in comparison.unmade:
            typer.echo(f"{name}: {reason}")
        _print_timeline(best.timeline, files)
    return {
        "ranks": comparison.ranks,
        "microbatches": comparison.microbatches,
        "memory_limit": _finite(comparison.memory_limit),
        "rows": rows,
        "unmade": dict(comparison.unmade),
        "best": best.name,
        "verdict": comparison.verdict,
        "schedule": json.loads(best.schedule.to_json()),
        "files": [str(path) for path in files],
    }


def _check_file(path: Path, costs: Costs, memory: float | None, out: Path | None, *, quiet: bool) -> dict[str, Any]:
    """Check and time the user's own schedule; return what ``--json`` prints."""
    found = _read(path).check(memory_limit=memory, costs=costs)
    timeline = found.simulate(costs)
    files = _write(timeline, out, partial(write_timeline, timeline, limit=memory))
    if not quiet:
        typer.echo(f"{path}: placed, complete, ordered, executable" + (", in memory" if memory is not None else ""))
        _print_timeline(timeline, files)
    return {
        "ranks": found.ranks,
        "microbatches": found.n_microbatches,
        "memory_limit": _finite(memory),
        "bubble_rate": timeline.bubble_rate,
        "makespan": timeline.makespan,
        "period": timeline.period,
        "peak_memory": timeline.peak_memory,
        "idle": list(timeline.idle),
        "bottlenecks": [{"what": b.what, "time": b.time, "share": b.share} for b in timeline.bottlenecks],
        "files": [str(path) for path in files],
    }


def _read(path: Path) -> Schedule:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MisuseError("the schedule file cannot be read", got=str(error), fix="check the path") from None
    return schedule.from_json(text) if path.suffix == ".json" else schedule.from_csv(text, name=path.stem)


def _has_waits() -> bool:
    """Whether the CSV of the torch that is installed says where sends end; torch itself takes long to import."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return True
    return (int(major), int(minor)) >= (2, 15)


def _write(timeline: Timeline, out: Path | None, page: Callable[[Path], Path]) -> list[Path]:
    """Write the schedule in every format, or the page alone; return the files."""
    if out is None:
        return []
    found = timeline.schedule
    with_transfers = found.to_csv("compute_comms", waits=_has_waits())
    tables = {f"{found.name}.csv": found.to_csv(), f"{found.name}.comms.csv": with_transfers}
    texts = {
        **(tables if found.copies == 1 else {}),  # which do not say how many copies there are
        f"{found.name}.json": found.to_json() + "\n",
        f"{found.name}.svg": timeline.to_svg(),
        f"{found.name}.trace.json": timeline.to_chrome_trace(),
    }
    alone = out.suffix == ".html"
    folder = out.parent if alone else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in () if alone else texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [page(out)] if alone else [*(folder / name for name in texts), page(folder / f"{found.name}.html")]
    except (OSError, ViewerError) as error:
        raise ScheduleError("--out cannot be written to", got=str(error), fix="choose another place") from None


def _print_table(comparison: Comparison) -> None:
    """Print the comparison; rows that do not fit are dim."""
    best = comparison.best
    columns = (
        TableColumn("schedule", right=False),
        TableColumn("bubble"),
        TableColumn("period", drop=4),
        TableColumn("makespan", drop=1),
        TableColumn("memory", drop=2),
        TableColumn("above bound", drop=3),
        TableColumn("fits", right=False),
    )
    cells = [
        (
            row.name,
            f"{row.bubble_rate:.2%}",
            f"{row.period:.6g}",
            f"{row.makespan:.6g}",
            comparison.show(row.peak_memory),
            f"{row.gap:.2%}" if row.fits else "",  # the bound is one for schedules that fit
            "best" if row is best else "yes" if row.fits else "no",
        )
        for row in comparison.rows
    ]
    styles = ["bold" if row is best else "" if row.fits else "dim" for row in comparison.rows]
    title = f"{comparison.ranks} ranks, {comparison.microbatches} microbatches, memory limit "
    show_table(columns, cells, title=title + comparison.show(comparison.memory_limit), styles=styles)


def _print_timeline(timeline: Timeline, files: list[Path]) -> None:
    """Draw the timeline, and print its critical path and the files that were written."""
    console = stdout()
    drawing = timeline.draw(color=console.is_terminal, width=max(20, console.width))
    console.print(Text.from_ansi(drawing), soft_wrap=True)
    parts = [f"{b.what} {b.share:.0%}" for b in timeline.bottlenecks[:3]]
    console.print(f"critical path: {', '.join(parts)}", highlight=False, markup=False, soft_wrap=True)
    for path in files:
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


def _finite(limit: float | None) -> float | None:
    """A limit as JSON has it, which knows no infinity."""
    return None if limit == math.inf else limit


def _print_json(value: dict[str, Any]) -> None:
    json.dump(value, sys.stdout, indent=1)
    sys.stdout.write("\n")
