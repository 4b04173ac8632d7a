"""Timelines and comparisons as pages of the viewer."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sternway.schedule._action import Overlap, Upkeep
from sternway.schedule._simulate import LINKS
from sternway.schedule._timeline import Timeline
from sternway.schedule.formats._terminal import ROWS, describe_size

if TYPE_CHECKING:
    from sternway.schedule.search import Comparison
    from sternway.viewer import LaneRun, PageSection, Sheet, Terms


def lane_run(
    timeline: Timeline, name: str, *, memory: Sequence[Sequence[tuple[float, float]]] | None = None
) -> "LaneRun":
    """A timeline as the viewer draws it; ``memory`` in other units than the timeline's own, if given.

    Example:
        >>> from sternway import schedule
        >>> run = lane_run(schedule.make("1f1b", ranks=2, microbatches=2).simulate(), "planned")
        >>> [event.label for event in run.events if event.rank == 1]
        ['1F0', '1B0', '1F1', '1B1']
    """
    from sternway.viewer import LaneEvent, LaneRun

    critical = {(event.rank, event.step) for event in timeline.critical_path}
    events = []
    for event in (event for rank in timeline.events for event in rank):
        upkeep = isinstance(event.action, Upkeep)
        if upkeep and event.end == event.start:  # it takes no time
            continue
        first = event.action if isinstance(event.action, Upkeep) else event.action.actions[0]
        places = timeline.schedule.placement[event.rank]
        events.append(
            LaneEvent(
                rank=event.rank,
                label="+".join(map(str, event.action.actions or (event.action,)))
                + (", forward again" if timeline.schedule.runs_again(event.action) else ""),
                op="+" if isinstance(event.action, Overlap) else first.op,
                start=event.start,
                end=event.end,
                stage=first.stage,
                microbatch=first.microbatch,
                critical=(event.rank, event.step) in critical,
                tint=places.index(first.stage) / max(1, len(places) - 1),
                link=ROWS[LINKS[first.op]] if upkeep else "",
            )
        )
    return LaneRun(name, events, timeline.memory if memory is None else memory, timeline.bubble_rate)


def write_timeline(timeline: Timeline, path: str | Path, *, limit: float | None = None) -> Path:
    """Write a page with one timeline, and return its path."""
    from sternway import viewer

    s = timeline.schedule
    title = f"{s.name}: {s.ranks} ranks, {s.n_microbatches} microbatches"
    return viewer.write(path, title=title, sections=_timeline_sections(timeline, limit))


def write_comparison(comparison: "Comparison", path: str | Path) -> Path:
    """Write a page with the best timeline and a table of all schedules, and return its path."""
    from sternway import viewer

    best = comparison.best
    title = (
        f"{best.name} on {comparison.ranks} ranks, {comparison.microbatches} microbatches: "
        f"bubble {best.bubble_rate:.1%}"
    )
    about, lanes = _timeline_sections(best.timeline, comparison.memory_limit)
    return viewer.write(path, title=title, sections=[about, _bars(comparison), lanes, _sheet(comparison)])


def _timeline_sections(timeline: Timeline, limit: float | None) -> "tuple[PageSection, PageSection]":
    from sternway.viewer import Lanes

    limit = None if limit == math.inf else limit
    return _terms(timeline, limit), Lanes(
        "Timeline",
        [lane_run(timeline, timeline.schedule.name)],
        memory_title="what each rank keeps, in forwards of one microbatch",
        limit=limit,
    )


def _terms(timeline: Timeline, limit: float | None) -> "Terms":
    from sternway.viewer import Terms

    s, costs = timeline.schedule, timeline.costs
    comm = [max(row) for row in costs.comm] if isinstance(costs.comm, Sequence) else costs.comm  # the slowest of a rank
    times = {"F": costs.F, "I": costs.I, "W": costs.W, "B": costs.B, "comm": comm}
    times |= {name: each for name in ("comm_busy", "overhead", "receive") if (each := getattr(costs, name))}
    times |= {"overlap": costs.overlap} if costs.overlap != 1 else {}
    times |= {"spread": costs.spread} if costs.spread else {}
    given = ", ".join(
        f"{name} = {':'.join(f'{each:g}' for each in time) if isinstance(time, Sequence) else f'{time:g}'}"
        for name, time in times.items()
        if time is not None
    )
    rows = [
        ("schedule", describe_size(s)),
        ("costs", given),
        ("makespan", f"{timeline.makespan:.6g}, from the first start to the last end"),
        ("period", f"{timeline.period:.6g}, a step among steps: each rank begins the next one when it is free"),
        ("bubble rate", f"{timeline.bubble_rate:.2%} of the longest span of a rank, {timeline.span:.6g}"),
        ("peak memory", f"{timeline.peak_memory:.4g}" + (f" of {limit:g} allowed" if limit is not None else "")),
        ("critical path", ", ".join(f"{part.what} {part.share:.0%}" for part in timeline.bottlenecks[:4])),
    ]
    return Terms("The plan", [row for row in rows if row[1]])


def _bars(comparison: "Comparison") -> "PageSection":
    from sternway.viewer import Bar, Bars

    rows = [row for row in comparison.rows if row.fits]
    return Bars(
        "Bubble of the schedules that fit",
        [Bar(row.name, row.bubble_rate, f"{row.bubble_rate:.1%}", ours=row is comparison.best) for row in rows],
    )


def _sheet(comparison: "Comparison") -> "Sheet":
    from sternway.viewer import Cell, Sheet

    columns = (
        "schedule",
        "stages per rank",
        "bubble rate",
        "period",
        "makespan",
        "peak memory",
        "above the bound",
        "verdict",
    )
    rows: list[Sequence[Cell]] = []
    for row in comparison.rows:
        verdict = "best" if row is comparison.best else "fits"
        rows.append(
            (
                row.name,
                row.schedule.stages_per_rank,
                (row.bubble_rate, f"{row.bubble_rate:.2%}"),
                (row.period, f"{row.period:.6g}"),
                (row.makespan, f"{row.makespan:.6g}"),
                (row.peak_memory, comparison.show(row.peak_memory)),
                (row.gap, f"{row.gap:.2%}") if row.fits else None,
                verdict if row.fits else comparison.excess(row),
            )
        )
    rows += [(name, None, None, None, None, None, None, reason) for name, reason in comparison.unmade]
    return Sheet(
        "All schedules",
        columns,
        rows,
        marked=[0],
        dim=[place for place, row in enumerate(comparison.rows) if not row.fits]
        + list(range(len(comparison.rows), len(rows))),
        note=f"Under a memory limit of {comparison.show(comparison.memory_limit)}: {comparison.verdict}.",
    )
