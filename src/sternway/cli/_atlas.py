"""``sternway atlas``: pages and indexes for a source tree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sternway.cli._exit import usage

if TYPE_CHECKING:
    from sternway.atlas import BuildReport

_SHOWN = 12  # lines of one list in the terminal; --json has all


def atlas(
    source: Annotated[Path, typer.Argument(help="The root of a source tree. Nothing in it is imported or run.")],
    out: Annotated[Path, typer.Option(help="The folder for the pages; not documented itself if it is inside SOURCE.")],
    include: Annotated[
        list[str] | None, typer.Option(help="Only files that match, as in a .gitignore; may be repeated.")
    ] = None,
    source_url: Annotated[
        str, typer.Option(help="Where a code host shows SOURCE; Markdown pages then link to lines there.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if pages are stale or a link is broken.")
    ] = False,
    measure: Annotated[
        str | None, typer.Option(help="path.py:function, which returns a model and a sample, to run and measure.")
    ] = None,
    measure_seconds: Annotated[float, typer.Option(min=1.0, help="The time limit for measuring.")] = 300.0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Explain a code base by parsing it: a page for every file and folder, keyword indexes, a site with search."""
    with usage():  # an AtlasError says that SOURCE cannot be documented as asked
        report = _make(source, out, include or [], source_url, check, measure, measure_seconds, jobs, as_json)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _show(report, checked=check)
    if not report.ok:
        raise typer.Exit(1)


def _make(
    source: Path,
    out: Path,
    include: list[str],
    source_url: str,
    check: bool,
    measure: str | None,
    measure_seconds: float,
    jobs: int | None,
    quiet: bool,
) -> BuildReport:
    from sternway import atlas as room

    if check:
        return room.check(source, out, include=include, source_url=source_url)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True, disable=quiet) as bar:
        tasks: dict[str, int] = {}

        def progress(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)  # type: ignore[arg-type]  # a TaskID is an int

        return room.build(
            source,
            out,
            include=include,
            source_url=source_url,
            jobs=jobs,
            measure=measure,
            measure_seconds=measure_seconds,
            progress=progress,
        )


def _show(report: BuildReport, *, checked: bool) -> None:
    console = Console()
    table = Table(title=f"Atlas of {escape(report.source)}", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("files", f"{report.files:,}")
    table.add_row("folders", f"{report.folders:,}")
    table.add_row("lines", f"{report.lines:,}")
    for name, count in sorted(report.languages.items(), key=lambda pair: (-pair[1], pair[0])):
        table.add_row(f"  {name}", f"{count:,}")
    if not checked:
        table.add_row("pages written", f"{report.written:,}")
        table.add_row("pages kept", f"{report.kept:,}")
        table.add_row("pages removed", f"{report.removed:,}")
    table.add_row("imports unresolved", f"{report.unresolved:,}")
    for kind, count in sorted(Counter(item.kind for item in report.problems).items()):
        table.add_row(f"  {kind}", f"{count:,}")
    table.add_row("broken links", f"{len(report.broken):,}")
    table.add_row("seconds", f"{report.seconds:.1f}")
    console.print(table)
    said = [
        f"{item.path}: {item.kind}, {item.text}" for item in report.problems if item.kind not in ("ignored", "output")
    ]
    _list(console, "Problems", said)
    _list(console, "Broken links", [f"{item.page} → {item.target}" for item in report.broken])
    _list(console, "Stale", list(report.stale))
    if checked:
        console.print("[green]The pages are up to date.[/green]" if report.ok else "[red]Not up to date.[/red]")
    else:
        console.print(f"Open {escape(report.out)}/index.html", highlight=False, soft_wrap=True)


def _list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(f"{title}:" + (f" {_SHOWN} of {len(lines):,}, all with --json" if len(lines) > _SHOWN else ""))
        for line in lines[:_SHOWN]:
            console.print(
                f"  {escape(line.encode('utf-8', 'backslashreplace').decode())}", highlight=False, soft_wrap=True
            )
