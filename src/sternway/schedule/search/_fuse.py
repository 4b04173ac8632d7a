"""Join I and W into whole backwards, wherever the step gets no longer by it: ``Timeline.span``, then the makespan.

Why: a whole backward costs less than its two halves, and most W of a step fill no gap. Where a rank runs I and W of a
microbatch close together anyway, joining them shortens its work; where another rank waits for I, it would lengthen the
step. So pairs are joined one after the other, and stay joined if the step gets no longer. Then the reverse: starting
with all pairs joined, they are split, and stay split if the step gets shorter. The better of the two is returned.
"""

from collections.abc import Iterator
from dataclasses import replace

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Step
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate

_BUDGET = 50_000
"""The number of actions timed from each start; in a large schedule, several pairs are tried at a time."""

Pair = tuple[int, Action]  # a rank, and the I of a pair


def fuse(schedule: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with I and W joined into B where the step gets no longer by it.

    It never needs more memory, since W only moves to an earlier place. The same call gives the same schedule.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("zb-h1", ranks=2, microbatches=4)
        >>> costs = schedule.Costs(F=1.0, I=1.2, W=1.0, B=1.9)
        >>> fused = schedule.fuse(s, costs)
        >>> fused.simulate(costs).makespan < s.simulate(costs).makespan
        True

    Args:
        schedule: a schedule of F, I and W; actions B stay as they are.
        costs: with ``B`` below I + W; otherwise the schedule is returned unchanged.

    Raises:
        ScheduleError: the schedule cannot run to its end, or the costs are for another number of stages.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "fuse needs a Schedule", schedule, "make or read one")
    ScheduleError.unless(
        isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(I=1, W=1, B=1.8)"
    )
    stage_costs = costs.per_stage(schedule.placement, schedule.recompute, schedule.copies)
    apart_and_joined = zip(stage_costs.I, stage_costs.W, stage_costs.B, strict=True)
    gains = [b < (i + w) * (1 - EPSILON) for i, w, b in apart_and_joined]
    pairs = [pair for pair in _pairs(schedule) if gains[pair[1].stage]]
    if not pairs:
        return schedule
    settled = [_settle(schedule, costs, pairs, start) for start in (frozenset[Pair](), frozenset(pairs))]
    joined, _ = min(settled, key=lambda found: found[1])
    return (
        replace(_join(schedule, joined), name=f"{schedule.name.removesuffix('-fused')}-fused") if joined else schedule
    )


def length(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """Return what to compare schedules by: the longest span of a rank, then the makespan, rounded to nine digits.

    No barrier separates steps, so a step costs what its longest rank takes from its first start to its last end.
    """
    timeline = simulate(schedule, costs)
    return float(f"{timeline.span:.9g}"), float(f"{timeline.makespan:.9g}")


def _settle(
    schedule: Schedule, costs: Costs, pairs: list[Pair], joined: frozenset[Pair]
) -> tuple[frozenset[Pair], tuple[float, float]]:
    """Join all pairs that are split, or split all that are joined, where it helps; return which are joined then."""
    best = length(_join(schedule, joined), costs)
    size = max(1, len(pairs) * sum(map(len, schedule.actions)) // _BUDGET)
    joining = not joined
    for first in range(0, len(pairs), size):
        tried = joined ^ frozenset(pairs[first : first + size])
        found = length(_join(schedule, tried), costs)
        if found < best or (found == best and joining):  # among equals, joined is less work
            joined, best = tried, found
    return joined, best


def _pairs(schedule: Schedule) -> Iterator[Pair]:
    """Yield every I that has a W, with its rank; those nearest to their W first."""
    found = []
    for rank, steps in enumerate(schedule.actions):
        place = {step: index for index, step in enumerate(steps) if isinstance(step, Action)}
        for step, index in place.items():
            if step.op == "I" and (weight := replace(step, op="W")) in place:
                found.append((place[weight] - index, index, rank, step))
    for _, _, rank, step in sorted(found, key=lambda each: each[:3]):
        yield rank, step


def _join(schedule: Schedule, pairs: frozenset[Pair]) -> Schedule:
    """Return the schedule with these I replaced by B, and their W removed."""
    instead: list[dict[Step, Step | None]] = [{} for _ in schedule.actions]
    for rank, step in pairs:
        instead[rank] |= {step: replace(step, op="B"), replace(step, op="W"): None}
    actions = [
        [places.get(step, step) for step in steps] for places, steps in zip(instead, schedule.actions, strict=True)
    ]
    return replace(schedule, actions=tuple(tuple(step for step in steps if step is not None) for steps in actions))
