"""Schedules and timelines as text for a terminal: a drawing of a timeline, and the few lines that ``print`` shows.

rank 0 |F0 F1 .     B0--- F2 B1--- .  B2--- |
rank 1 |.  F0 B0--- F1 B1--- F2 B2--- .     |
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep
from sternway.schedule._again import show_recompute
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import LINKS
from sternway.schedule._timeline import Event, Timeline

# 256-colour backgrounds close to those of Okabe and Ito, which colour-blind people can tell apart.
_ANSI = {
    "F": "48;5;74",
    "I": "48;5;179",
    "W": "48;5;36",
    "B": "48;5;173",
    "+": "48;5;175",
    "U": "48;5;67",
    "R": "48;5;250",
    "O": "48;5;67",
    "L": "48;5;250",
}
_LETTERS = {"OFFLOAD": "O", "RELOAD": "L"}
ROWS = {"net": "link", "out": "out", "back": "back"}
"""What the row of each link is called."""

_WIDEST = 400
_LINES, _LINE = 16, 100


def describe_schedule(schedule: Schedule) -> str:
    """Return what ``print(schedule)`` shows: its size, and the first actions of each rank.

    Example:
        >>> from sternway import schedule
        >>> print(schedule.make("zb-h1", ranks=2, microbatches=2))
        zb-h1: 2 ranks, 2 microbatches, 2 stages
        rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
        rank 1: 1F0 1I0 1F1 1I1 1W0 1W1
    """
    rows = (f"rank {rank}: {' '.join(map(str, steps))}" for rank, steps in enumerate(schedule.actions))
    return "\n".join([describe_size(schedule), *_first(rows, schedule.ranks)])


def describe_timeline(timeline: Timeline) -> str:
    """Return what ``print(timeline)`` shows: makespan, bubble rate, memory, and the idle time of each rank."""
    t = timeline
    numbers = (
        f"makespan {t.makespan:.6g}, longest span of a rank {t.span:.6g}, "
        f"bubble rate {t.bubble_rate:.1%}, peak memory {t.peak_memory:.4g}"
    )
    rows = (
        f"rank {rank}: busy {busy:.6g}, idle {idle:.6g}, peak memory {peak:.4g}"
        for rank, (busy, idle, peak) in enumerate(zip(t.busy, t.idle, t.peaks, strict=True))
    )
    lines = [describe_size(t.schedule), numbers, *_first(rows, t.schedule.ranks)]
    if t.bottlenecks:
        lines.append("critical path: " + ", ".join(f"{b.what} {b.share:.0%}" for b in t.bottlenecks[:3]))
    return "\n".join(lines)


def describe_size(schedule: Schedule) -> str:
    """Return the name and the numbers, the first line of what ``print`` shows."""
    counts = (
        (schedule.ranks, "rank", "ranks"),
        (schedule.n_microbatches, "microbatch", "microbatches"),
        (schedule.num_stages, "stage", "stages"),
    )
    words = (f"{count} {one if count == 1 else several}" for count, one, several in counts)
    some = show_recompute(schedule.recompute)
    more = f" in {schedule.copies} copies of the model" if schedule.copies > 1 else ""
    return f"{schedule.name}: {', '.join(words)}{more}" + (f"; recomputed: {some}" if some else "")


def _first(rows: Iterable[str], count: int) -> list[str]:
    """Return the rows, shortened to what a screen has room for."""
    lines = [row if len(row) <= _LINE else f"{row[: _LINE - 2].rsplit(' ', 1)[0]} …" for row in islice(rows, _LINES)]
    return lines if count <= _LINES else [*lines, f"… and {count - _LINES} more ranks"]


def draw(timeline: Timeline, *, color: bool = False, width: int | None = None) -> str:
    """Return a drawing of a timeline.

    Example:
        >>> from sternway import schedule
        >>> print(schedule.make("zb-h1", ranks=2, microbatches=2).draw())
        zb-h1: 2 ranks, 2 microbatches; makespan 7, bubble rate 14.3%, peak memory 2
        rank 0 |F0 F1 .  I0 W0 I1 W1 |
        rank 1 |.  F0 I0 F1 I1 W0 W1 |

    Each action is its op and microbatch, then dashes until it ends. ``F'0`` is of the rank's second stage, ``F''0`` of
    its third. ``B0r`` is of a recomputed stage, whose forward runs again first. A dot is idle time. ``+`` is an
    overlapped pair, with the microbatch of its forward. Where stages are sharded, a second line has what the rank's
    link does: ``U`` gathers a stage, ``R`` reduces its gradients. Where microbatches are offloaded, two more lines have
    those that leave, ``O0``, and that come back, ``L0``.

    Args:
        timeline: the timeline.
        color: whether to use ANSI colours.
        width: the largest number of characters in a line; by default, as many as labels need, up to 400. Where labels
            do not fit, only ops are drawn; where those do not fit either, only some of them.
    """
    if width is not None and (type(width) is not int or width < 20):
        raise ScheduleError("width must be at least 20 characters", got=repr(width), fix="pass 20 or more")
    head = len(f"rank {timeline.schedule.ranks - 1} |")
    room = (width or _WIDEST) - head - 1
    span = timeline.makespan or 1.0
    needed = _scale(timeline)
    scale = needed if needed and needed * span <= room else room / span
    # Numbers stay if only a few labels lose the space behind them.
    numbers = scale >= 0.7 * needed
    lines = [_title(timeline)]
    for rank, events in enumerate(timeline.events):
        computing = [event for event in events if not isinstance(event.action, Upkeep)]
        lines.append(f"{f'rank {rank}':<{head - 2}} |{_line(timeline, computing, scale, numbers, color)}|")
        for link, name in ROWS.items():
            carried = [event for event in events if isinstance(event.action, Upkeep) and event.end > event.start]
            carried = [event for event in carried if LINKS[event.action.op] == link]  # type: ignore[union-attr]
            if carried:
                lines.append(f"{name:<{head - 2}} |{_line(timeline, carried, scale, numbers, color)}|")
    return "\n".join(lines)


def _title(timeline: Timeline) -> str:
    s = timeline.schedule
    return (
        f"{s.name}: {s.ranks} ranks, {s.n_microbatches} microbatches; makespan {timeline.makespan:g}, "
        f"bubble rate {timeline.bubble_rate:.1%}, peak memory {timeline.peak_memory:g}"
    )


def _scale(timeline: Timeline) -> float:
    """Return the number of characters for a unit of time at which every label fits, with a space behind it."""
    needed = 0.0
    for rank, events in enumerate(timeline.events):
        for event in events:
            if event.end > event.start:
                needed = max(needed, (len(_label(timeline, rank, event)) + 1) / (event.end - event.start))
    return needed


def _label(timeline: Timeline, rank: int, event: Event) -> str:
    action = event.action
    if isinstance(action, Upkeep):
        number = "" if action.microbatch is None else action.microbatch
        return f"{_LETTERS.get(action.op, action.op[0])}{_local(timeline, rank, action)}{number}"
    if isinstance(action, Overlap):
        return f"+{_local(timeline, rank, action.forward)}{action.forward.microbatch}"
    again = "r" if timeline.schedule.runs_again(action) else ""
    return f"{action.op}{_local(timeline, rank, action)}{action.microbatch}{again}"


def _local(timeline: Timeline, rank: int, action: Action | Upkeep) -> str:
    return "'" * timeline.schedule.placement[rank].index(action.stage)


def _line(timeline: Timeline, events: Sequence[Event], scale: float, numbers: bool, color: bool) -> str:
    """Return one rank's line: labels where they fit, dots where the rank is idle."""
    cells: list[str] = []
    at = 0
    for event in events:
        start, end = round(event.start * scale), round(event.end * scale)
        if start > at:
            cells.append("." + " " * (start - at - 1))
            at = start
        length = end - at
        if length <= 0:
            continue
        label = _label(timeline, event.rank, event)
        text = label if numbers and len(label) <= length else label[0]
        # A space between labels; without numbers it would look like idle time.
        text = text.ljust(length - 1, "-").ljust(length) if numbers else text.ljust(length, "-")
        cells.append(f"\x1b[30;{_ANSI[label[0]]}m{text}\x1b[0m" if color else text)
        at = end
    end = round(timeline.makespan * scale)
    if end > at:
        cells.append("." + " " * (end - at - 1))
    return "".join(cells)
