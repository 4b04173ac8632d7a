"""Every schedule there is for these numbers, under one limit, in one table: which to take, and what it costs.

Rows compare because costs are for a rank's whole share of the model: a schedule with two stages a rank does
the same work in smaller steps. Each is measured against the lower bound of its own placement, as no order
of the same stages on the same ranks can be faster.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from sternway.errors import ScheduleError
from sternway.schedule._costs import Costs
from sternway.schedule._lower_bound import bound
from sternway.schedule._make import make, names
from sternway.schedule._problem import EPSILON, demand, resolve
from sternway.schedule._schedule import Schedule
from sternway.schedule._search import Progress, half_of, search
from sternway.schedule._timeline import Timeline


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule of a comparison.

    Attributes:
        name: the schedule's; ``search`` and ``search-v`` are the searched ones, with one and two stages a
            rank.
        schedule: what to run.
        timeline: its simulation under the comparison's costs.
        bound: what the longest span of a rank cannot be below, for this placement and limit.
        fits: whether it stays within the memory limit.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    bound: float
    fits: bool

    @property
    def bubble_rate(self) -> float:
        """The part of the longest span in which the busiest rank has nothing to do."""
        return self.timeline.bubble_rate

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return self.timeline.makespan

    @property
    def peak_memory(self) -> float:
        """The most that a rank holds."""
        return self.timeline.peak_memory

    @property
    def gap(self) -> float:
        """How far its cost is above the bound, as a part of it; negative only where it does not fit."""
        if self.bound <= 0:
            return 0.0
        gap = self.timeline.span / self.bound - 1
        return 0.0 if abs(gap) < EPSILON else gap


@dataclass(frozen=True, slots=True)
class Comparison:
    """All schedules under one limit: those that fit by cost, the best first, then those that do not.

    ``unmade`` has the name and the reason of each that cannot be made, or timed, with these numbers.
    """

    costs: Costs
    ranks: int
    microbatches: int
    memory_limit: float
    rows: tuple[Row, ...]
    unmade: tuple[tuple[str, str], ...]

    @property
    def best(self) -> Row:
        """The fastest row that fits."""
        return self.rows[0]

    def table(self) -> str:
        """Return the comparison as plain text, one line for each schedule."""
        head = ("schedule", "stages/rank", "bubble rate", "makespan", "peak memory", "over the bound", "")
        lines = [head, *(_cells(row, self.memory_limit) for row in self.rows)]
        lines += [(name, "", "", "", "", "", reason) for name, reason in self.unmade]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
        text = []
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True)]
            text.append("  ".join([*cells, line[-1]]).rstrip())
        return "\n".join(text)


def compare(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every named schedule and the searched ones under one memory limit.

    Example:
        >>> from sternway.schedule import Costs
        >>> comparison = compare(Costs(), ranks=2, microbatches=4, memory_limit=2)
        >>> comparison.best.fits, round(comparison.best.bubble_rate, 4)
        (True, 0.0)

    Args:
        costs: times and memory; with one number for each stage, only schedules with that many stages can be
            timed, and the others are listed with that reason.
        ranks: the number of ranks.
        microbatches: the number of microbatches in a step.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share.
        progress: called with (done, total) as the searches go on.

    Raises:
        ScheduleError: counts below 1, a limit in which not even one microbatch fits, or per-stage costs
            with which no schedule at all can be timed.
    """
    demand(costs, ranks, microbatches, memory_limit)
    rows, unmade = [], []
    for name, build in _builders(costs, ranks, microbatches, memory_limit, progress):
        try:
            rows.append(_measure(name, build(), costs, memory_limit))
        except ScheduleError as error:
            unmade.append((name, str(error)))
            problem = error  # the searches come last, and theirs says what would do
    rows.sort(key=_order)
    if not rows or not rows[0].fits:
        raise problem
    return Comparison(costs, ranks, microbatches, memory_limit, tuple(rows), tuple(unmade))


def _builders(
    costs: Costs, ranks: int, microbatches: int, memory_limit: float, progress: Progress | None
) -> Iterator[tuple[str, Callable[[], Schedule]]]:
    """Yield each schedule's name and how to make it."""
    for name in names():
        yield name, partial(make, name, ranks=ranks, microbatches=microbatches)
    for half, stages_per_rank in enumerate((1, 2)):
        yield (
            "search" if stages_per_rank == 1 else "search-v",
            partial(
                search,
                costs,
                ranks=ranks,
                microbatches=microbatches,
                memory_limit=memory_limit,
                stages_per_rank=stages_per_rank,
                progress=half_of(progress, half),
            ),
        )


def _measure(name: str, schedule: Schedule, costs: Costs, memory_limit: float) -> Row:
    """Time a schedule and hold it against the limit and the bound."""
    timeline = schedule.simulate(costs)
    least = bound(resolve(costs, schedule.placement, schedule.n_microbatches, memory_limit, joined=True))
    return Row(name, schedule, timeline, least, fits=timeline.peak_memory <= memory_limit + EPSILON)


def _order(row: Row) -> tuple[bool, float, float]:
    """Return what to sort rows by; costs that differ by rounding only are the same."""
    return not row.fits, float(f"{row.timeline.span:.9g}"), row.makespan


def _cells(row: Row, limit: float) -> tuple[str, ...]:
    """Return a row's texts."""
    return (
        row.name,
        str(row.schedule.stages_per_rank),
        f"{row.bubble_rate:.4f}",
        f"{row.makespan:.6g}",
        f"{row.peak_memory:.4g}",
        f"{row.gap:.2%}" if row.fits else "",
        "" if row.fits else f"{row.peak_memory - limit:.4g} over the memory limit",
    )
