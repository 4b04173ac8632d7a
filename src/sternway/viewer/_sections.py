"""The sections of a report, as frozen data; the page's scripts draw one kind each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from sternway.errors import ViewerError

Cell: TypeAlias = str | float | tuple[float, str] | None
"""What one cell of a ``Sheet`` has: words, a number, a number and how it is shown, or nothing."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms and what there is to say about each, as ("Model", "8 blocks")."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence that says whether something is as it should be."""

    text: str
    good: bool


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; ``text`` stands behind it instead of its value, and ``ours`` marks it."""

    name: str
    value: float
    text: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale. With the unit "s" or "B", seconds or bytes are shown as ms, MiB and so on.

    A bar of ``full`` would fill the width; by default the longest does.
    """

    title: str
    bars: Sequence[Bar]
    unit: str = ""
    full: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line through points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines in one chart, and what its axes are."""

    title: str
    curves: Sequence[Curve]
    x: str = ""
    y: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class LaneEvent:
    """One action of one rank, from ``start`` to ``end``.

    ``op`` gives the colour: "F", "I", "W", "B", "+" for an overlapped pair, "UNSHARD" and so on, or any other word.
    ``tint``, from 0 to 1, makes it lighter. With a ``link``, it runs beside the computation, and is drawn in a row of
    that name below what the rank computes.
    """

    rank: int
    label: str
    op: str
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    critical: bool = False
    tint: float = 0.0
    link: str = ""


@dataclass(frozen=True, slots=True)
class LaneRun:
    """What all ranks did, as planned or as measured.

    ``memory`` is, for each rank, pairs of (time, what it keeps from then on). ``bubble`` is the share of lost time.
    """

    name: str
    events: Sequence[LaneEvent]
    memory: Sequence[Sequence[tuple[float, float]]] = ()
    bubble: float | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """Timelines one below the other on one scale, to zoom, to pan and to ask about.

    ``unit`` is of times ("s", or a word), ``memory_unit`` of memory ("B", or a word). A rank may keep ``limit``.
    """

    title: str
    runs: Sequence[LaneRun]
    unit: str = ""
    memory_unit: str = ""
    memory_title: str = "what each rank keeps"
    limit: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table that sorts by its columns.

    A cell is text, a number, (what to sort by, text), or None. ``marked`` and ``dim`` are places of rows.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marked: Sequence[int] = ()
    dim: Sequence[int] = ()
    note: str = ""


PageSection: TypeAlias = Terms | Verdict | Bars | Curves | Lanes | Sheet
"""What a page is made of."""

_KINDS = (Terms, Verdict, Bars, Curves, Lanes, Sheet)


def to_data(section: PageSection) -> dict[str, Any]:
    """A section as the page's scripts read it."""
    ViewerError.unless(
        isinstance(section, _KINDS), "a section must be one of the viewer's", section, "pass viewer.Curves(…)"
    )
    if isinstance(section, Lanes):
        for event in (event for run in section.runs for event in run.events):
            if not event.rank >= 0 or not event.end >= event.start:
                raise ViewerError(
                    "an action must have a rank from 0 on, and end after its start",
                    got=f"{event.label} on rank {event.rank} from {event.start} to {event.end}",
                    fix="correct it",
                )
    return {"kind": type(section).__name__.lower(), **asdict(section)}
