"""A timeline for a terminal: one line for each rank, time to the right.

rank 0 |F0 F1 .     B0--- F2 B1--- .  B2--- |
rank 1 |.  F0 B0--- F1 B1--- F2 B2--- .     |
"""

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap
from sternway.schedule._timeline import Event, Timeline

# 256-colour backgrounds near Okabe and Ito's, which differ for colour-blind eyes too; always with the letter.
_ANSI = {"F": "48;5;74", "I": "48;5;179", "W": "48;5;36", "B": "48;5;173", "+": "48;5;175"}
_WIDEST = 400


def draw(timeline: Timeline, *, color: bool = False, width: int | None = None) -> str:
    """Return a drawing in text.

    Example:
        >>> from sternway import schedule
        >>> print(schedule.make("zb-h1", ranks=2, microbatches=2).draw())
        zb-h1: 2 ranks, 2 microbatches; makespan 7, bubble rate 14.3%, peak memory 2
        rank 0 |F0 F1 .  I0 W0 I1 W1 |
        rank 1 |.  F0 I0 F1 I1 W0 W1 |

    Each action starts with its op and microbatch, with a ``'`` for each stage of its rank before it
    (``F'0`` is of the second), and goes on with dashes; a dot is idle time. ``+`` is an overlapped pair,
    with its forward's microbatch.

    Args:
        timeline: what to draw.
        color: whether to use ANSI colours.
        width: the most characters a line may have; by default, as many as labels need, up to 400. Where
            labels do not fit, only ops are left, and where those do not, one of several.
    """
    if width is not None and (type(width) is not int or width < 20):
        raise ScheduleError("a drawing is at least 20 characters wide", got=repr(width), fix="pass more")
    head = len(f"rank {timeline.schedule.ranks - 1} |")
    room = (width or _WIDEST) - head - 1
    span = timeline.makespan or 1.0
    needed = _scale(timeline)
    scale = needed if needed and needed * span <= room else room / span
    # A few labels that lose their space are worth the numbers on all; many are not.
    numbers = scale >= 0.7 * needed
    lines = [_title(timeline)]
    lines += [
        f"{f'rank {rank}':<{head - 2}} |{_line(timeline, events, scale, numbers, color)}|"
        for rank, events in enumerate(timeline.events)
    ]
    return "\n".join(lines)


def _title(timeline: Timeline) -> str:
    s = timeline.schedule
    return (
        f"{s.name}: {s.ranks} ranks, {s.n_microbatches} microbatches; makespan {timeline.makespan:g}, "
        f"bubble rate {timeline.bubble_rate:.1%}, peak memory {timeline.peak_memory:g}"
    )


def _scale(timeline: Timeline) -> float:
    """Return how many characters a unit of time needs for every action to have its label and a space."""
    needed = 0.0
    for rank, events in enumerate(timeline.events):
        for event in events:
            if event.end > event.start:
                needed = max(needed, (len(_label(timeline, rank, event)) + 1) / (event.end - event.start))
    return needed


def _label(timeline: Timeline, rank: int, event: Event) -> str:
    action = event.action
    if isinstance(action, Overlap):
        return f"+{_local(timeline, rank, action.forward)}{action.forward.microbatch}"
    return f"{action.op}{_local(timeline, rank, action)}{action.microbatch}"


def _local(timeline: Timeline, rank: int, action: Action) -> str:
    return "'" * timeline.schedule.placement[rank].index(action.stage)


def _line(timeline: Timeline, events: tuple[Event, ...], scale: float, numbers: bool, color: bool) -> str:
    """Return one rank's line: labels where they fit, dots where it waits."""
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
