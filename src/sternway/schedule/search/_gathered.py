"""Plans of sharded stages, priced with their upkeep; and how many stages each rank keeps gathered.

Why: gathering and reducing take a link, not the rank, but a stage cannot begin before it is gathered, a step ends with
its last reduction, and what is gathered takes memory that microbatches could have. So the order that is best for plain
stages may not be so for sharded ones. In the picture a rank reduces stage 1 while stage 0 still computes:

    rank    |F0 F1 I1 W1 I0 W0|                  gathered at the start, both
    link    |        |-- 1 --|-- 0 --|           a step ends with the last reduction

Fewer stages are gathered at once only where bytes bind: each rank keeps as many as fit beside what its order holds.
More are never slower, since each is gathered as soon as there is room, and then less often.

The best plans for plain stages are priced, and the best of those improved: a step on the critical path, which goes
through links, too, is moved to another place of its rank, as long as that helps.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sternway.errors import ScheduleError
from sternway.schedule._action import Step, Upkeep
from sternway.schedule._again import Recompute
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._memory import peak
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate
from sternway.schedule._timeline import Timeline
from sternway.schedule._upkeep import sharded_row, without_shards
from sternway.schedule.search._fuse import fuse
from sternway.schedule.search._problem import Limit

_STARTS = 2  # plans that are improved
_BUDGET = 20_000  # actions that are timed meanwhile, for each of them

RankFits = Callable[[Schedule, int], bool]
"""Whether a rank of a plan holds no more than it may."""

Rows = dict[tuple[int, tuple[Step, ...], Recompute], tuple[Step, ...] | None]
"""For a rank, its steps and the stages that are recomputed: the steps with upkeep; None if they do not fit."""


def rest_of(costs: Costs, placement: Placement, limit: Limit, stages: Collection[int], most: int | None) -> list[Limit]:
    """Return what ranks have for microbatches beside what they keep gathered: with all stages, and with ever fewer."""
    sizes = costs.per_stage(placement).gathered
    held = [sorted((sizes[stage] for stage in own if stage in stages), reverse=True) for own in placement]
    limits = limit if isinstance(limit, Sequence) else [limit] * len(placement)
    found: dict[tuple[float, ...], None] = {}
    for count in [most] if most is not None else range(max(map(len, held)), 0, -1):
        found[tuple(each - math.fsum(own[:count]) for each, own in zip(limits, held, strict=True))] = None
    return list(found)


def gathered_within(
    plan: Schedule, stages: Collection[int], gathered: int | None, fits: RankFits, known: Rows | None = None
) -> Schedule | None:
    """Return the plan with upkeep, of which each rank keeps as many stages gathered as fit; None if not even one does.

    Args:
        plan: the plan; what upkeep of shards it has is replaced.
        stages: those that are sharded.
        gathered: how many stages a rank keeps gathered; by default as many as fit.
        fits: whether a rank holds no more than it may.
        known: what was found for the rows of other plans, if a rank's row alone decides that.
    """
    rows: list[tuple[Step, ...]] = []
    for rank, steps in enumerate(plan.actions):
        key = rank, steps, plan.recompute
        row = known[key] if known is not None and key in known else _row_within(plan, rank, stages, gathered, fits)
        if known is not None:
            known[key] = row
        if row is None:
            return None
        rows.append(row)
    return replace(plan, actions=tuple(rows))


def _row_within(
    plan: Schedule, rank: int, stages: Collection[int], gathered: int | None, fits: RankFits
) -> tuple[Step, ...] | None:
    own = len(set(plan.placement[rank]).intersection(stages))
    for count in [gathered] if gathered is not None else range(max(1, own), 0, -1):
        row = sharded_row(plan.actions[rank], stages, count)
        if fits(replace(plan, actions=(*plan.actions[:rank], row, *plan.actions[rank + 1 :])), rank):
            return row
    return None


def within_limit(costs: Costs, limit: Limit) -> RankFits:
    """Return whether a rank stays within a limit in units of memory."""
    return lambda plan, rank: (
        peak(plan, rank, costs) <= (limit[rank] if isinstance(limit, Sequence) else limit) + EPSILON
    )


def best_gathered(
    plans: Iterable[Schedule], costs: Costs, stages: Collection[int], gathered: int | None, limit: Limit
) -> Schedule | None:
    """Return the plan with the shortest step among others, with upkeep; None if none is within the limit."""
    price = partial(_priced, costs=costs, stages=stages, gathered=gathered, fits=within_limit(costs, limit), known={})
    both = dict.fromkeys(each for plan in plans for each in (plan, fuse(plan, costs)))
    found = sorted(filter(None, map(price, both)), key=lambda each: each.time)
    better = [_improved(each, price) for each in found[:_STARTS]]
    return min(better, key=lambda each: each.time).plan if better else None


@dataclass(frozen=True, slots=True)
class _Priced:
    """A plan with upkeep, and the time of a step among others and of one alone."""

    time: tuple[float, float]
    plan: Schedule
    timeline: Timeline


def _priced(
    plan: Schedule, costs: Costs, stages: Collection[int], gathered: int | None, fits: RankFits, known: Rows
) -> _Priced | None:
    """Return a plan with its upkeep; None if it does not fit, or cannot run."""
    made = gathered_within(plan, stages, gathered, fits, known)
    if made is None:
        return None
    try:
        timeline = simulate(made, costs)
    except ScheduleError:  # a move has made it wait forever
        return None
    return _Priced(step_time(timeline), made, timeline)


def _improved(start: _Priced, price: Callable[[Schedule], _Priced | None]) -> _Priced:
    """Return the plan with steps moved as long as that makes it shorter, and the budget lasts."""
    best, left, moving = start, _BUDGET // sum(map(len, start.plan.actions)), True
    while moving:
        moving = False
        for trial in _moves(best):
            left -= 1
            found = price(trial)
            if found is not None and found.time < best.time:
                best, moving = found, left > 0
                break
            if left <= 0:
                break
    return best


def _moves(priced: _Priced) -> Iterator[Schedule]:
    """Yield the plan with one step of its critical path in another place, the last ones first."""
    rows = [tuple(without_shards(steps)) for steps in priced.plan.actions]
    for event in reversed(priced.timeline.critical_path):
        if isinstance(event.action, Upkeep):
            continue
        row = rows[event.rank]
        place = row.index(event.action)
        others = row[:place] + row[place + 1 :]
        for index in range(len(row)):
            crossed = row[min(place, index) : max(place, index) + 1]
            if index != place and not any(map(partial(_tied, event.action), crossed)):
                moved = (*others[:index], event.action, *others[index:])
                yield replace(priced.plan, actions=(*rows[: event.rank], moved, *rows[event.rank + 1 :]))


def _tied(step: Step, other: Step) -> bool:
    """Return whether two steps of a rank have an order: of one stage, of one kind or for one microbatch."""
    return step is not other and any(
        one.stage == two.stage and (one.op == two.op or one.microbatch == two.microbatch)
        for one in step.actions
        for two in other.actions
    )


def step_time(timeline: Timeline) -> tuple[float, float]:
    """Return what to compare plans with upkeep by: the time of a step among others, then the makespan."""
    return float(f"{timeline.period:.9g}"), float(f"{timeline.makespan:.9g}")


def too_small(
    costs: Costs, placement: Placement, limit: Limit, stages: Collection[int], gathered: int | None, recomputes: bool
) -> ScheduleError:
    """Return the error if nothing fits, with what would; where stages may be recomputed, that is not so simple."""
    each = costs.per_stage(placement)
    least = max(
        math.fsum(max(each.keeps[s], each.keeps_after_i[s]) for s in own)
        + math.fsum(sorted((each.gathered[s] for s in own if s in stages), reverse=True)[: gathered or 1])
        for own in placement
    )
    return ScheduleError(
        f"memory_limit must be large enough for one microbatch and {gathered or 1} of a rank's stages gathered",
        got=f"memory_limit={limit!r}",
        fix=f"pass {'more' if recomputes else f'{least:g} or more'}",
    )
