"""The few plans that are worth a trial: those that a simulation ranks first, among the orders of one placement."""

from collections.abc import Iterator
from dataclasses import replace

from sternway.errors import ScheduleError
from sternway.schedule._costs import Costs
from sternway.schedule._offload import without_moves
from sternway.schedule._schedule import Schedule, looped_placement
from sternway.schedule.named._make import names
from sternway.schedule.search._fuse import fuse
from sternway.schedule.search._gathered import RankFits, gathered_within, step_time, within_limit
from sternway.schedule.search._hunt import named
from sternway.schedule.search._problem import Limit, place
from sternway.schedule.search._search import moved_within, search


def candidates(
    running: Schedule,
    costs: Costs,
    *,
    memory_limit: Limit,
    count: int,
    fits: RankFits | None = None,
    gathered: int | None = None,
) -> list[Schedule]:
    """Return the best plans for these costs whose stages are where they are now, and recompute the same; best first.

    They are the result of a search, the named schedules and these with I and W joined where that helps, of which
    those that stay within the limit are ranked by the time of a step among others. The running schedule takes part. If
    it has sharded stages, all plans have their upkeep; if it offloads microbatches, others may.

    Example:
        >>> from sternway import schedule
        >>> running = schedule.make("1f1b", ranks=2, microbatches=4)
        >>> [plan.name for plan in candidates(running, Costs(W=0.5), memory_limit=2, count=2)]
        ['search', '1f1b']

    Args:
        running: the schedule whose placement stays.
        costs: of F, I and W.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share; one number, or one
            for each rank.
        count: how many.
        fits: whether a rank of a plan, given by its number, holds no more than it may; by default if it is within the
            limit. The running plan always takes part.
        gathered: how many of its sharded stages a rank keeps gathered; by default as many as fit.
    """
    if running.copies > 1:
        raise ScheduleError(
            "other plans are for a schedule of one copy of the model",
            got=f"{running.name}, of {running.copies} copies",
            fix='pass one of those that names() lists, such as "dualpipe-v"',
        )
    held, most = running.gathered, within_limit(costs, memory_limit)

    def allowed(plan: Schedule, rank: int) -> bool:
        return most(plan, rank) and (fits is None or fits(plan, rank))

    found: list[tuple[tuple[float, float], Schedule]] = []
    for plan in _plans(running, costs, memory_limit, held, gathered):
        if held:
            made = gathered_within(plan, held, gathered, allowed)
        else:
            made = plan if all(allowed(plan, rank) for rank in range(plan.ranks)) else None
        if made is not None:
            found.append((step_time(made.simulate(costs)), made))
    found.append((step_time(running.simulate(costs)), running))
    unlike: dict[object, Schedule] = {}
    for _, plan in sorted(found, key=lambda each: each[0]):
        unlike.setdefault(plan.actions, plan)
    return list(unlike.values())[:count]


def _plans(
    running: Schedule, costs: Costs, memory_limit: Limit, held: frozenset[int], gathered: int | None
) -> Iterator[Schedule]:
    ranks, microbatches, per_rank = running.ranks, running.n_microbatches, len(running.placement[0])
    moves, looped = without_moves(running) is not running, running.placement == looped_placement(ranks, per_rank)
    if running.placement == place(ranks, per_rank, looped):  # a search places stages so
        try:
            yield search(
                costs,
                ranks=ranks,
                microbatches=microbatches,
                memory_limit=memory_limit,
                stages_per_rank=per_rank,
                looped=looped,
                recompute=running.recompute,
                offload=moves,
                sharded=held or False,
                gathered=gathered if held else None,
            )
        except ScheduleError:
            if not moves and not running.recompute:
                raise
            yield running  # not even one microbatch, by a count that is a little too high, or with none that moves
    for made in named(running.placement, microbatches, names(), per_rank):
        plan = replace(made, recompute=running.recompute)
        yield plan
        yield fuse(plan, costs)
        if moves:
            yield from moved_within(plan, costs, memory_limit)
