"""A timeline as SVG: one row for each rank, microbatch numbers, a time axis, and memory below.

    title and legend
    rank 0  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇     one row for each rank, one box for each action
    rank 1    ▇▇▇▇▇▇▇▇▇▇▇▇▇
            |----|----|----|    time
            ▁▂▃▄▅▅▅▅▄▃▂▁        what each rank keeps

The colours are those of Okabe and Ito, which colour-blind people can tell apart. No meaning depends on colour alone:
each box has a tooltip with the action's name, and memory lines differ in their dashes. What a rank's link gathers and
reduces is a thin bar at the foot of its row.
"""

import math
from collections.abc import Iterator
from html import escape

from sternway.schedule._action import Overlap, Upkeep
from sternway.schedule._timeline import Event, Timeline

_FILL = {
    "F": "#56B4E9",
    "I": "#E69F00",
    "W": "#009E73",
    "B": "#D55E00",
    "+": "#CC79A7",
    "again": "#56B4E9",
    "UNSHARD": "#0072B2",
    "REDUCE_GRAD": "#000000",
    "OFFLOAD": "#0072B2",
    "RELOAD": "#D55E00",
}
_MEANING = {
    "F": "forward",
    "I": "input gradient",
    "W": "weight gradient",
    "B": "whole backward",
    "+": "overlapped",
    "again": "bar at the top: forward again",
    "UNSHARD": "gathers parameters",
    "REDUCE_GRAD": "reduces gradients",
    "OFFLOAD": "moves away",
    "RELOAD": "comes back",
}
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_LEFT, _RIGHT, _TOP = 64, 44, 66
_ROW, _BOX, _LINK = 28, 24, 5
_MEMORY = 110
_BOX_WIDTH = 24  # of an action of median length
_WIDEST = 6000


class _Axes:
    """Coordinates: times to x, ranks to y, memory to y."""

    def __init__(self, timeline: Timeline) -> None:
        lengths = sorted(
            e.end - e.start
            for events in timeline.events
            for e in events
            if e.end > e.start and not isinstance(e.action, Upkeep)
        )
        median = lengths[len(lengths) // 2] if lengths else 1.0
        self.span = timeline.makespan or 1.0
        self.scale = min(_BOX_WIDTH / median, _WIDEST / self.span)
        # Narrow pages would cut the legend off.
        self.width = max(_LEFT + self.span * self.scale + _RIGHT, 640.0)
        self.axis = _TOP + _ROW * len(timeline.events) + 4
        self.memory_top = self.axis + 52
        self.memory_bottom = self.memory_top + _MEMORY
        self.height = self.memory_bottom + 34
        self.most = timeline.peak_memory or 1.0

    def x(self, time: float) -> float:
        return _LEFT + time * self.scale

    def y(self, memory: float) -> float:
        return self.memory_bottom - memory / self.most * _MEMORY


def to_svg(timeline: Timeline) -> str:
    """Draw a timeline as SVG.

    Example:
        >>> from sternway import schedule
        >>> svg = schedule.make("zb-v", ranks=4, microbatches=8).simulate().to_svg()
        >>> svg.startswith("<svg") and svg.endswith("</svg>\\n")
        True
    """
    page = _Axes(timeline)
    width, height = f"{page.width:.0f}", f"{page.height:.0f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" style="max-width: 100%; height: auto" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#111">',
        *_heading(timeline),
        *_ranks(timeline, page),
        *_time_axis(timeline, page),
        *_memory(timeline, page),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _heading(timeline: Timeline) -> Iterator[str]:
    """The title, the numbers, and what the colours mean."""
    s = timeline.schedule
    title = f"{s.name}: {s.ranks} ranks, {s.n_microbatches} microbatches"
    numbers = (
        f"makespan {timeline.makespan:g}, bubble rate {timeline.bubble_rate:.2%}, peak memory {timeline.peak_memory:g}"
    )
    yield f"<title>{escape(title)}</title>"
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield f'<text x="8" y="20" font-size="15" font-weight="600">{escape(title)}'
    yield f'<tspan font-size="12" font-weight="400" fill="#444" dx="12">{numbers}</tspan></text>'
    used = {_kind(event) for events in timeline.events for event in events if event.end > event.start}
    used |= {"again"} if s.recompute else set()
    x = float(_LEFT)
    for kind in (kind for kind in _FILL if kind in used):
        yield f'<rect x="{x:.0f}" y="34" width="14" height="14" rx="2" fill="{_FILL[kind]}"/>'
        label = f"{kind}  {_MEANING[kind]}" if len(kind) == 1 and kind != "+" else _MEANING[kind]
        yield f'<text x="{x + 20:.0f}" y="46">{label}</text>'
        x += 36 + 6.4 * len(label)
    if s.stages_per_rank > 1:
        yield f'<text x="{x:.0f}" y="46" fill="#444">lighter: the rank\'s later stages</text>'


def _ranks(timeline: Timeline, page: _Axes) -> Iterator[str]:
    """One row for each rank, one box for each action."""
    for rank, events in enumerate(timeline.events):
        top = _TOP + rank * _ROW
        yield f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">rank {rank}</text>'
        length = page.span * page.scale
        yield f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BOX}" fill="#f2f2f2"/>'
        for event in events:
            if not isinstance(event.action, Upkeep):
                yield _box(timeline, page, event, top)
        for event in events:
            if isinstance(event.action, Upkeep) and event.end > event.start:
                yield _bar(page, event, top)


def _box(timeline: Timeline, page: _Axes, event: Event, top: float) -> str:
    """One action: a box with a tooltip, and its microbatch's number where it fits."""
    x, width = page.x(event.start), (event.end - event.start) * page.scale
    first = event.action.actions[0]
    local = timeline.schedule.placement[event.rank].index(first.stage)
    fill = _FILL[_kind(event)]
    shade = _tint(fill, 0.55 * local / max(1, len(timeline.schedule.placement[event.rank]) - 1))
    again = timeline.schedule.runs_again(event.action)
    tip = f"{event.action}{', forward again' if again else ''}: {event.start:g} to {event.end:g}"
    box = (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BOX}" '
        f'fill="{shade}" stroke="#fff" stroke-width="{min(1.0, width / 8):.2f}"/>'
    )
    if again:
        box += f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_LINK}" fill="{_FILL["again"]}"/>'
    label = "·".join(str(action.microbatch) for action in event.action.actions)
    if width >= 6.5 * len(label) + 2:
        box += f'<text x="{x + width / 2:.2f}" y="{top + 16}" text-anchor="middle">{label}</text>'
    return box + "</g>"


def _bar(page: _Axes, event: Event, top: float) -> str:
    """What a link of a rank carries; what comes back is above what leaves, since both may be at once."""
    foot = top + _BOX - _LINK * (2 if _kind(event) == "RELOAD" else 1)
    x, width = page.x(event.start), (event.end - event.start) * page.scale
    tip = f"{event.action}: {event.start:g} to {event.end:g}"
    return (
        f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{foot:.0f}" width="{width:.2f}" '
        f'height="{_LINK}" fill="{_FILL[_kind(event)]}"/></g>'
    )


def _time_axis(timeline: Timeline, page: _Axes) -> Iterator[str]:
    yield f'<path d="M{_LEFT} {page.axis}H{page.x(page.span):.1f}" stroke="#444" fill="none"/>'
    for tick in _ticks(page.span, page.span * page.scale / 60):
        x = page.x(tick)
        yield f'<path d="M{x:.1f} {page.axis}v5" stroke="#444"/>'
        yield f'<text x="{x:.1f}" y="{page.axis + 18}" text-anchor="middle" fill="#444">{tick:g}</text>'
    yield f'<text x="{_LEFT - 8}" y="{page.axis + 18}" text-anchor="end" fill="#444">time</text>'


def _memory(timeline: Timeline, page: _Axes) -> Iterator[str]:
    """What each rank keeps over time, in steps, on one scale."""
    top, bottom = page.memory_top, page.memory_bottom
    for tick in _ticks(page.most, 4):
        y = page.y(tick)
        yield f'<path d="M{_LEFT} {y:.1f}H{page.x(page.span):.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{tick:g}</text>'
    caption = "memory of each rank, in microbatches of one rank's share"
    yield f'<text x="{_LEFT}" y="{top - 10}" fill="#444">{caption}</text>'
    for rank, curve in enumerate(timeline.memory):
        points = [f"M{page.x(0):.1f} {page.y(0):.1f}"]
        points += [f"H{page.x(time):.1f}V{page.y(level):.1f}" for time, level in curve]
        style = f'stroke="{_LINES[rank % len(_LINES)]}" stroke-width="1.8" fill="none"'
        dash = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 2"')[rank % 3]
        yield f'<path d="{"".join(points)}" {style}{dash} opacity="0.9"><title>rank {rank}</title></path>'
    yield from _memory_legend(len(timeline.memory), bottom + 20)


def _memory_legend(ranks: int, y: float) -> Iterator[str]:
    """A legend of the memory lines, for as many ranks as there are colours."""
    for rank in range(min(ranks, len(_LINES))):
        x = _LEFT + 72 * rank
        dash = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 2"')[rank % 3]
        yield f'<path d="M{x} {y - 4}h20" stroke="{_LINES[rank]}" stroke-width="1.8"{dash}/>'
        yield f'<text x="{x + 24}" y="{y}">rank {rank}</text>'
    if ranks > len(_LINES):
        yield f'<text x="{_LEFT + 72 * len(_LINES)}" y="{y}">and so on</text>'


def _kind(event: Event) -> str:
    return "+" if isinstance(event.action, Overlap) else event.action.op


def _tint(color: str, amount: float) -> str:
    """Mix a colour with white."""
    channels = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * amount):02X}" for c in channels)


def _ticks(span: float, at_most: float) -> list[float]:
    """Return round numbers from 0 to span, in steps of 1, 2 or 5 times a power of ten."""
    rough = span / max(at_most, 1.0)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * 0.999)
    return [i * step for i in range(int(span / step * 1.0001) + 1)]
