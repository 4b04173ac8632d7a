"""A table of every schedule for these costs and this memory limit.

Rows are comparable because costs are for a rank's whole share of the model: a schedule with two stages per rank does
the same work in smaller steps. Each is measured against the lower bound of its own placement.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path

from sternway._bytes import show_bytes
from sternway.errors import ScheduleError
from sternway.schedule._again import show_recompute
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._schedule import Schedule
from sternway.schedule._timeline import Timeline
from sternway.schedule._upkeep import sharded as add_upkeep
from sternway.schedule.named._make import make, names
from sternway.schedule.search._choices import everything
from sternway.schedule.search._gathered import gathered_within, step_time, within_limit
from sternway.schedule.search._hunt import Progress, part_of
from sternway.schedule.search._lower_bound import bound, least_bound
from sternway.schedule.search._problem import check_arguments, limit_of, resolve
from sternway.schedule.search._search import checked_shards, moved_within, search


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule of a comparison.

    Attributes:
        name: the schedule's name; ``search`` and ``search-v`` were searched, with one and two stages per rank.
        schedule: the schedule.
        timeline: its simulation with the comparison's costs.
        bound: the lower bound of the longest span of a rank, for this placement and limit, whatever is recomputed if
            the comparison allows that; where microbatches may be offloaded, that of unlimited memory.
        fits: whether it stays within the memory limit.
    """

    name: str
    schedule: Schedule
    timeline: Timeline
    bound: float
    fits: bool

    @property
    def bubble_rate(self) -> float:
        """The fraction of the longest span in which the busiest rank is idle."""
        return self.timeline.bubble_rate

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return self.timeline.makespan

    @property
    def period(self) -> float:
        """The time of a step when steps follow each other without a barrier."""
        return self.timeline.period

    @property
    def peak_memory(self) -> float:
        """The most that any rank holds."""
        return self.timeline.peak_memory

    @property
    def peak_bytes(self) -> float | None:
        """The most that any rank holds, in bytes; None where the costs do not know."""
        return self.timeline.costs.bytes_of(self.peak_memory)

    @property
    def gap(self) -> float:
        """How far its span is above the bound, as a fraction of it; negative only where it does not fit."""
        if self.bound <= 0:
            return 0.0
        gap = self.timeline.span / self.bound - 1
        return 0.0 if abs(gap) < EPSILON else gap


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """All schedules under one memory limit: those that fit come first, the shortest span first; then the others.

    Of sharded stages, the shortest period comes first.

    ``unmade`` has the name of each schedule that cannot be made or timed with these numbers, and the reason.
    """

    costs: Costs
    ranks: int
    microbatches: int
    memory_limit: float
    rows: tuple[Row, ...]
    unmade: tuple[tuple[str, str], ...]
    recompute: bool = False
    offload: bool = False

    def __repr__(self) -> str:
        return f"<Comparison of {len(self.rows)} schedules: {self._title()}; best {self.best.name}>"

    def __str__(self) -> str:
        return f"{self._title()}\n{self.table()}"

    def _repr_html_(self) -> str:
        head, *lines = self._lines()
        rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        rows += ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{escape(self._title())}</caption>{body}</table>"

    @property
    def best(self) -> Row:
        """The fastest row that fits."""
        return self.rows[0]

    def to_html(self, path: str | Path) -> Path:
        """Write a page with the best timeline, all schedules and what each rank keeps, and return its path."""
        from sternway.schedule.formats import write_comparison

        return write_comparison(self, path)

    def table(self) -> str:
        """Return the comparison as plain text, one line for each schedule."""
        lines = self._lines()
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
        text = []
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:], strict=True)]
            text.append("  ".join([*cells, line[-1]]).rstrip())
        return "\n".join(text)

    def _title(self) -> str:
        return f"{self.ranks} ranks, {self.microbatches} microbatches, memory limit {self.show(self.memory_limit)}"

    def show(self, memory: float) -> str:
        """Return an amount of memory as text: in bytes where the costs know them, what a rank holds anyway included."""
        size = self.costs.bytes_of(memory)
        return f"{memory:.4g}" if size is None else show_bytes(size)

    def excess(self, row: Row) -> str:
        """Return by how much a row is over the limit, as text."""
        over = row.peak_memory - self.memory_limit
        unit = self.costs.activation_bytes
        return f"{show_bytes(over * unit) if unit else f'{over:.4g}'} over the memory limit"

    @property
    def verdict(self) -> str:
        """How far the best schedule is from the bound, and whether more memory would lower that.

        Example:
            >>> print(compare(Costs(), ranks=4, microbatches=8, memory_limit=2).verdict)
            v-min is 0.0% above anything possible; memory binds: 3 instead of 2 would lower the bound by 10.2%
        """
        best = self.best
        some = show_recompute(best.schedule.recompute)
        text = f"{best.name}{f' (stages recomputed: {some})' if some else ''} is {best.gap:.1%} above anything possible"
        if self.offload:
            return f"{text} with unlimited memory"
        more = self.memory_limit + self.costs.smallest()
        then = _bound(self.costs, best.schedule, more, self.recompute)
        gain = 1 - then / best.bound if best.bound > 0 else 0.0
        if gain <= EPSILON:
            return f"{text}; memory does not bind"
        return (
            f"{text}; memory binds: {self.show(more)} instead of {self.show(self.memory_limit)} would lower the bound "
            f"by {gain:.1%}"
        )

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, the head first."""
        head = ("schedule", "stages/rank", "bubble rate", "period", "makespan", "peak memory", "over the bound", "")
        lines = [head, *(_cells(row, self) for row in self.rows)]
        return lines + [(name, "", "", "", "", "", "", reason) for name, reason in self.unmade]


def compare(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float | None = None,
    memory: int | str | None = None,
    recompute: bool = False,
    offload: bool = False,
    sharded: bool = False,
    gathered: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare every named schedule and the searched ones under one memory limit.

    Example:
        >>> from sternway.schedule import Costs
        >>> comparison = compare(Costs(), ranks=2, microbatches=4, memory_limit=2)
        >>> comparison.best.fits, round(comparison.best.bubble_rate, 4)
        (True, 0.0)

    Args:
        costs: times and memory; with one number for each stage, only schedules with that many stages can be timed, and
            the others are listed in ``unmade``.
        ranks: the number of ranks.
        microbatches: the number of microbatches in a step.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share.
        memory: or what it has in bytes, or as text such as "20GB"; the costs must have ``activation_bytes``.
        recompute: whether stages may be recomputed: the named schedules are listed as they are and with all stages
            recomputed, and a search chooses the stages, and how many of their ``costs.blocks``.
        offload: whether microbatches may be moved to the host and back, for ``costs.offload`` each: those schedules
            that do not fit are listed with moves, too, and a search takes the shortest plan with or without.
        sharded: whether all stages are sharded: schedules have upkeep, as in ``search``, and that with the shortest
            period is best. The bound counts no gathering.
        gathered: how many of its stages a rank keeps gathered at once; by default as many as fit.
        progress: called with (done, total) during the searches.

    Raises:
        ScheduleError: a count is below 1, not even one microbatch fits in the limit, or no schedule can be timed with
            these per-stage costs.
    """
    limit = limit_of(costs, memory_limit, memory)
    if not isinstance(limit, int | float):
        raise ScheduleError(
            "a comparison has one memory limit for all ranks",
            got=f"memory_limit={limit!r}",
            fix="pass one number, or search with a limit for each rank",
        )
    check_arguments(costs, ranks, microbatches, limit)
    ScheduleError.unless(type(sharded) is bool, "sharded must be True or False", sharded, "pass True: all stages are")
    checked_shards(sharded, gathered, ranks)
    rows, unmade = [], []
    if sharded and offload:
        raise ScheduleError("a comparison cannot both shard and offload stages", got="both", fix="leave one out")
    searched = partial(
        search,
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=limit,
        recompute="auto" if recompute else (),
        offload=offload,
        sharded=sharded,
        gathered=gathered,
    )
    bound_within = math.inf if offload else limit
    for name, build in _builders(searched, costs, ranks, microbatches, recompute, progress):
        try:
            plan = build()
            if sharded:
                plan = _with_upkeep(plan, costs, limit, gathered)
            row = _measure(name, plan, costs, limit, bound_within, recompute)
            rows.append(row)
            if offload and not row.fits:
                moved = moved_within(row.schedule, costs, limit)
                rows += [_measure(f"{name}, offloaded", each, costs, limit, bound_within, recompute) for each in moved]
        except ScheduleError as error:
            unmade.append((name, str(error)))
            problem = error  # the searches come last, and their error says what would work
    rows.sort(key=_priced_order if sharded else _order)
    if not rows or not rows[0].fits:
        raise problem
    return Comparison(costs, ranks, microbatches, limit, tuple(rows), tuple(unmade), recompute, offload)


def _with_upkeep(plan: Schedule, costs: Costs, memory_limit: float, gathered: int | None) -> Schedule:
    """Return a schedule with as much gathered as fits; if nothing does, with as little as can be."""
    made = gathered_within(plan, range(plan.num_stages), gathered, within_limit(costs, memory_limit))
    return made or add_upkeep(plan, gathered=gathered or 1)


def _builders(
    searched: Callable[..., Schedule],
    costs: Costs,
    ranks: int,
    microbatches: int,
    recompute: bool,
    progress: Progress | None,
) -> Iterator[tuple[str, Callable[[], Schedule]]]:
    """Yield each schedule's name and how to make it."""
    for name in names():
        build = partial(make, name, ranks=ranks, microbatches=microbatches)
        yield name, build
        if recompute:
            yield f"{name}, recomputed", partial(_recomputed, build, costs)
    for half, name in enumerate(("search", "search-v")):
        yield name, partial(searched, stages_per_rank=half + 1, progress=part_of(progress, half, 2))


def _recomputed(build: Callable[[], Schedule], costs: Costs) -> Schedule:
    """Return a schedule with all stages recomputed."""
    made = build()
    return replace(made, recompute=everything(costs, made.num_stages))


def _bound(costs: Costs, schedule: Schedule, memory_limit: float, recompute: bool) -> float:
    """Return the bound of a schedule's placement."""
    if recompute:
        return least_bound(costs, schedule.placement, schedule.n_microbatches, memory_limit)
    return bound(resolve(costs, schedule.placement, schedule.n_microbatches, memory_limit, joined=True, whole=False))


def _measure(
    name: str, schedule: Schedule, costs: Costs, memory_limit: float, bound_within: float, recompute: bool
) -> Row:
    """Time a schedule and compare it with the limit, and with the bound of ``bound_within``."""
    timeline = schedule.simulate(costs)
    least = _bound(costs, schedule, bound_within, recompute)
    return Row(name, schedule, timeline, least, fits=timeline.peak_memory <= memory_limit + EPSILON)


def _order(row: Row) -> tuple[bool, float, float]:
    """Return what to sort rows by; spans that differ by rounding only are equal."""
    return not row.fits, float(f"{row.timeline.span:.9g}"), row.makespan


def _priced_order(row: Row) -> tuple[bool, tuple[float, float]]:
    """Return what to sort rows of sharded stages by: a span begins after the first gathering."""
    return not row.fits, step_time(row.timeline)


def _cells(row: Row, within: Comparison) -> tuple[str, ...]:
    """Return a row's texts."""
    return (
        row.name,
        str(row.schedule.stages_per_rank),
        f"{row.bubble_rate:.4f}",
        f"{row.period:.6g}",
        f"{row.makespan:.6g}",
        within.show(row.peak_memory),
        f"{row.gap:.2%}" if row.fits else "",
        "" if row.fits else within.excess(row),
    )
