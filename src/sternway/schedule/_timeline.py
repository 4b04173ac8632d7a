"""What a schedule does in time: the result of a simulation, as frozen data.

The bubble rate is that of the zero-bubble paper (arXiv 2401.10241, section 5.3):

    bubble_rate = (span - work) / span

where ``span`` is the longest span of any one rank, from its first start to its last end, and ``work`` is
m (F + I + W), what a rank needs for its own actions. It is not the makespan: with the paper's optimizer
step each rank goes on to the next step on its own, so the stagger between ranks is no loss. Where ranks
have unequal work, ``work`` is that of the busiest, so that the rate is 0 when no order of the same
actions could be faster for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sternway.schedule._action import Action, Overlap
from sternway.schedule._costs import Costs
from sternway.schedule._memory import memory_steps, peak

if TYPE_CHECKING:
    from sternway.schedule._schedule import Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one rank, timed: ``schedule.actions[rank][step]`` runs from ``start`` to ``end``."""

    rank: int
    step: int
    action: Action | Overlap
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A kind of work on the critical path: ``time`` of it, a ``share`` of the makespan.

    Made faster by a tenth, it shortens the step by at most a tenth of ``time``, and by exactly that while the
    critical path stays where it is.
    """

    what: str
    time: float
    share: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every action runs, and what follows from it.

    Example:
        >>> from sternway import schedule
        >>> t = schedule.make("1f1b", ranks=2, microbatches=4).simulate()
        >>> t.makespan, t.idle, t.bubble_rate, t.peak_memory
        (15.0, (3.0, 0.0), 0.2, 2.0)

    Attributes:
        schedule: what was timed.
        costs: under which costs.
        events: for each rank, its steps in order.
        makespan: from the first start to the last end, over all ranks.
        busy: for each rank, the time it computes.
        idle: for each rank, the time it waits between its first start and its last end.
        span: the longest span of any one rank; see the module's head.
        bubble_rate: the part of ``span`` in which the busiest rank has nothing to do.
        peak_memory: the largest memory of any rank; ``peaks`` has each rank's.
        critical_path: the events that made the makespan what it is, first to last: each starts when the one
            before it ends, or when its result arrives.
        bottlenecks: what the critical path is made of, the largest part first: what would help most.
    """

    schedule: "Schedule"
    costs: Costs
    events: tuple[tuple[Event, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    span: float
    bubble_rate: float
    peaks: tuple[float, ...]
    critical_path: tuple[Event, ...]
    bottlenecks: tuple[Bottleneck, ...]

    @property
    def peak_memory(self) -> float:
        """The largest memory of any rank at any time."""
        return max(self.peaks)

    @property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, its memory over time: pairs of (time, memory from then on)."""
        return tuple(self._memory_of(rank) for rank in range(len(self.events)))

    def _memory_of(self, rank: int) -> tuple[tuple[float, float], ...]:
        stages = max(1, len(self.schedule.placement[rank]))
        steps = self.schedule.actions[rank]
        levels = memory_steps(steps, stages=stages, memory_after_i=self.costs.memory_after_I)
        curve = [(0.0, 0.0)]
        for event, (during, after) in zip(self.events[rank], levels, strict=True):
            for time, level in ((event.start, during), (event.end, after)):
                if time == curve[-1][0]:  # what is freed and taken at the same time was never free
                    curve.pop()
                if not curve or level != curve[-1][1]:
                    curve.append((time, level))
        return tuple(curve)

    @classmethod
    def measured(
        cls, schedule: "Schedule", times: Sequence[Sequence[tuple[float, float]]], memory_after_I: float = 1.0
    ) -> "Timeline":
        """What really ran: each rank's (start, end) of every action, on one clock, as a timeline that begins at 0.

        Example:
            >>> from sternway import schedule
            >>> s = schedule.make("gpipe", ranks=1, microbatches=1)
            >>> Timeline.measured(s, [[(5.0, 6.0), (6.5, 8.5)]]).makespan
            3.5
        """
        zero = min((rank[0][0] for rank in times if rank), default=0.0)
        events = tuple(
            tuple(
                Event(rank, index, action, start - zero, end - zero)
                for index, (action, (start, end)) in enumerate(zip(schedule.actions[rank], pairs, strict=True))
            )
            for rank, pairs in enumerate(times)
        )
        busy = tuple(sum(event.end - event.start for event in rank) for rank in events)
        spans = tuple(rank[-1].end - rank[0].start if rank else 0.0 for rank in events)
        return cls(
            schedule=schedule,
            costs=Costs(memory_after_I=memory_after_I),
            events=events,
            makespan=max((rank[-1].end for rank in events if rank), default=0.0),
            busy=busy,
            idle=tuple(span - used for span, used in zip(spans, busy, strict=True)),
            span=max(spans),
            bubble_rate=max(0.0, 1 - max(busy) / max(spans)) if max(spans) > 0 else 0.0,
            peaks=tuple(
                peak(steps, stages=max(1, len(stages)), memory_after_i=memory_after_I)
                for steps, stages in zip(schedule.actions, schedule.placement, strict=True)
            ),
            critical_path=(),
            bottlenecks=(),
        )

    def to_chrome_trace(self) -> str:
        """Return it as a Chrome trace (JSON), which Perfetto and chrome://tracing open."""
        from sternway.schedule._chrome_trace import to_chrome_trace

        return to_chrome_trace(self)

    def to_svg(self) -> str:
        """Return it as a drawing: ranks as rows, time to the right, memory underneath."""
        from sternway.schedule._svg import to_svg

        return to_svg(self)

    def draw(self, *, color: bool = False, width: int | None = None) -> str:
        """Return a drawing for a terminal: one line for each rank, time to the right."""
        from sternway.schedule._draw import draw

        return draw(self, color=color, width=width)
