"""When every action of a schedule runs: the result of a simulation, or of a measured step, as frozen data.

The bubble rate is that of the zero-bubble paper (arXiv 2401.10241, section 5.3):

    bubble_rate = (span - work) / span

``span`` is the longest time of any one rank from its first start to its last end, and ``work`` is m (F + I + W), the
time that a rank computes. It is not the makespan: with the paper's optimizer step each rank goes on to the next step on
its own, so ranks that start one after the other lose nothing. Where ranks have unequal work, ``work`` is that of the
busiest rank, so that the rate is 0 when no other order of the same actions could be faster.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sternway.errors import ScheduleError
from sternway.schedule._action import Step, Upkeep
from sternway.schedule._costs import Costs
from sternway.schedule._memory import kept_by, memory_steps, peak

if TYPE_CHECKING:
    from sternway.schedule._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """One timed step of one rank: ``schedule.actions[rank][step]`` runs from ``start`` to ``end``."""

    rank: int
    step: int
    action: Step
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A kind of work on the critical path: how much ``time`` of it, and its ``share`` of the makespan.

    Making this work 10% faster shortens the step by at most 10% of ``time``, and by exactly that as long as the
    critical path stays the same.
    """

    what: str
    time: float
    share: float


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """When every action runs, with idle times, memory and the critical path.

    Example:
        >>> from sternway import schedule
        >>> t = schedule.make("1f1b", ranks=2, microbatches=4).simulate()
        >>> t.makespan, t.idle, t.bubble_rate, t.peak_memory
        (15.0, (3.0, 0.0), 0.2, 2.0)
        >>> print(t)
        1f1b: 2 ranks, 4 microbatches, 2 stages
        makespan 15, longest span of a rank 15, bubble rate 20.0%, peak memory 2
        rank 0: busy 12, idle 3, peak memory 2
        rank 1: busy 12, idle 0, peak memory 1
        critical path: B of stage 1 53%, F of stage 1 27%, B of stage 0 13%

    Attributes:
        schedule: the schedule that was timed.
        costs: the costs that it was timed with.
        events: for each rank, its steps in order.
        makespan: from the first start to the last end, over all ranks.
        busy: for each rank, the time that it computes.
        idle: for each rank, the time that it waits between its first start and its last end.
        span: the longest time of any one rank from its first start to its last end.
        bubble_rate: the fraction of ``span`` in which the busiest rank is idle.
        critical_path: the events that determine the makespan, first to last: each starts when the one before it
            ends, or when its result arrives.
        bottlenecks: what the critical path consists of, the largest part first.
        turn: if measured, how long the rank of the first stage took from its last action of the step before to its
            first of this one; None if there was no step before, or it was not recorded.
    """

    schedule: "Schedule"
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    span: float
    bubble_rate: float
    critical_path: tuple[Event, ...]
    bottlenecks: tuple[Bottleneck, ...]
    turn: float | None = None

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.schedule.name}: makespan {self.makespan:.6g}, "
            f"bubble rate {self.bubble_rate:.1%}, peak memory {self.peak_memory:.4g}>"
        )

    def __str__(self) -> str:
        from sternway.schedule.formats import describe_timeline

        return describe_timeline(self)

    def _repr_html_(self) -> str:
        return self.to_svg()

    @property
    def period(self) -> float:
        """The time of a step when steps follow each other, and each rank begins the next one as soon as it is free.

        If measured: from the end of the step before to that of this one, on the rank of the first stage, which waits
        for nobody to begin; if ``turn`` is unknown, ``span``, after which every rank could begin the same again.

        Example:
            >>> from sternway import schedule
            >>> t = schedule.make("zb-h2", ranks=4, microbatches=8).simulate()
            >>> t.makespan, t.period         # ranks start one after the other, but each is always at work
            (27.0, 24.0)
        """
        from sternway.schedule._period import period_of

        if self.critical_path:
            return period_of(self.schedule, self.costs)
        if self.turn is None:
            return self.span
        first = self.events[self.schedule.rank_of(0)]
        return self.turn + max(event.end for event in first) - first[0].start

    @property
    def peaks(self) -> tuple[float, ...]:
        """For each rank, its largest memory."""
        return tuple(peak(self.schedule, rank, self.costs) for rank in range(self.schedule.ranks))

    @property
    def peak_memory(self) -> float:
        """The largest memory of any rank at any time."""
        return max(self.peaks)

    @property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, its memory over time: pairs of (time, memory from then on)."""
        ranks = range(len(self.events))
        return tuple(self._curve(rank, memory_steps(self.schedule, rank, self.costs)) for rank in ranks)

    def memory_of(
        self, after_f: Sequence[float], after_i: Sequence[float], gathered: Sequence[float] | None = None
    ) -> tuple[tuple[tuple[float, float], ...], ...]:
        """``memory`` in units of your own, such as bytes: what F of each stage keeps, and what I leaves of it.

        ``gathered`` is what the gathered parameters of each stage take, from its UNSHARD to its RESHARD.

        Example:
            >>> from sternway import schedule
            >>> schedule.make("gpipe", ranks=1, microbatches=2).simulate().memory_of([100], [50])
            (((0.0, 100), (1.0, 200), (4.0, 100), (6.0, 0)),)
        """
        for name, sizes in (("after_f", after_f), ("after_i", after_i), ("gathered", gathered or after_f)):
            if len(sizes) != self.schedule.num_stages:
                raise ScheduleError(
                    f"{name} must have one size for each of {self.schedule.num_stages} stages",
                    got=str(len(sizes)),
                    fix="pass a list of that length",
                )
        ranks = range(len(self.events))
        rows = self.schedule.actions
        return tuple(self._curve(rank, kept_by(rows[rank], after_f, after_i, gathered)) for rank in ranks)

    def _curve(self, rank: int, levels: Iterator[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
        curve = [(0.0, 0.0)]
        clock = 0.0  # of the rank, which waits for no upkeep but OFFLOAD
        for event, (during, after) in zip(self.events[rank], levels, strict=True):
            if isinstance(event.action, Upkeep):
                begin = clock = max(clock, event.end) if event.action.op == "OFFLOAD" else clock
            else:
                begin, clock = event.start, event.end
            for time, level in ((begin, during), (clock, after)):
                if time == curve[-1][0]:  # what is freed and taken at the same time was never free
                    curve.pop()
                if not curve or level != curve[-1][1]:
                    curve.append((time, level))
        return tuple(curve)

    @classmethod
    def measured(
        cls,
        schedule: "Schedule",
        times: Sequence[Sequence[tuple[float, float]]],
        memory_after_I: float = 1.0,
        costs: Costs | None = None,
        turn: float | None = None,
    ) -> "Timeline":
        """Build a timeline from measured times: each rank's (start, end) of every action, all on one clock.

        The first start becomes 0. A measured timeline has no critical path and no bottlenecks. Its memory is that of
        ``costs``, if given, of which nothing else counts. ``turn`` is the time between it and the step before.

        Example:
            >>> from sternway import schedule
            >>> s = schedule.make("gpipe", ranks=1, microbatches=1)
            >>> Timeline.measured(s, [[(5.0, 6.0), (6.5, 8.5)]]).makespan
            3.5
        """
        zero = min((rank[0][0] for rank in times if rank), default=0.0)
        events = [
            [
                Event(rank, index, action, start - zero, end - zero)
                for index, (action, (start, end)) in enumerate(zip(schedule.actions[rank], pairs, strict=True))
            ]
            for rank, pairs in enumerate(times)
        ]
        memory = Costs(memory_after_I=memory_after_I) if costs is None else costs.memory_alone()
        return replace(timeline_of(schedule, memory, events), turn=turn)

    def to_chrome_trace(self) -> str:
        """Return a Chrome trace (JSON), which Perfetto and chrome://tracing open."""
        from sternway.schedule.formats import to_chrome_trace

        return to_chrome_trace(self)

    def to_svg(self) -> str:
        """Return an SVG drawing: one row for each rank, time to the right, memory below."""
        from sternway.schedule.formats import to_svg

        return to_svg(self)

    def to_html(self, path: str | Path) -> Path:
        """Write a page with this timeline, to zoom and to ask about, and return its path."""
        from sternway.schedule.formats import write_timeline

        return write_timeline(self, path)

    def draw(self, *, color: bool = False, width: int | None = None) -> str:
        """Return a drawing for a terminal: one line for each rank, time to the right."""
        from sternway.schedule.formats import draw

        return draw(self, color=color, width=width)


def timeline_of(
    schedule: "Schedule",
    costs: Costs,
    events: Sequence[Sequence[Event]],
    critical_path: tuple[Event, ...] = (),
    bottlenecks: tuple[Bottleneck, ...] = (),
) -> Timeline:
    """Build a timeline from each rank's events. Upkeep runs beside the computation, and no rank is busy with it."""
    computing = [[event for event in rank if not isinstance(event.action, Upkeep)] for rank in events]
    busy = tuple(math.fsum(event.end - event.start for event in rank) for rank in computing)
    spans = [
        max(event.end for event in rank) - own[0].start if own else 0.0
        for rank, own in zip(events, computing, strict=True)
    ]
    span, work = max(spans), max(busy)
    return Timeline(
        schedule=schedule,
        costs=costs,
        events=tuple(map(tuple, events)),
        makespan=max((event.end for rank in events for event in rank), default=0.0),
        busy=busy,
        idle=tuple(max(0.0, whole - used) for whole, used in zip(spans, busy, strict=True)),
        span=span,
        bubble_rate=max(0.0, (span - work) / span) if span > 0 else 0.0,  # rounding can make it a little negative
        critical_path=critical_path,
        bottlenecks=bottlenecks,
    )
