"""What does a step cost when steps follow each other, and no barrier separates them?

Each rank begins the next step as soon as it has ended its own part of this one. So the times at which ranks end a step
follow from those at which they ended the one before, in the same way every time:

    rank 0  |── step 1 ──|── step 2 ──|── step 3 ──|           ends[n + 1] = after(ends[n])
    rank 1     |── step 1 ──|── step 2 ──|── step 3 ──|        after() takes only sums and maxima

Such times end in a pattern that repeats (max-plus linear systems): some steps later, all ranks are later by the same
amount. That amount, for one step, is the period.
"""

from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._depends import run
from sternway.schedule._schedule import Schedule

_MOST = 64  # steps to look for the pattern; then the average of the second half counts


def period_of(schedule: Schedule, costs: Costs) -> float:
    """The time of a step among many, for a schedule that runs to its end."""
    steps = _steps(schedule, costs)
    ends = [[0.0] * schedule.ranks]
    for number in range(1, _MOST + 1):
        ends.append(_after(ends[-1], steps, costs.comm))
        for earlier in range(number - 1, -1, -1):
            shifts = [now - then for now, then in zip(ends[number], ends[earlier], strict=True)]
            if max(shifts) - min(shifts) <= EPSILON * max(shifts):
                return max(shifts) / (number - earlier)
    half = _MOST // 2
    return (max(ends[-1]) - max(ends[half])) / (_MOST - half)


_Step = tuple[int, float, list[int], list[int]]  # rank, length, what it waits for, what it computes


def _steps(schedule: Schedule, costs: Costs) -> list[_Step]:
    """Every step of every rank, in an order in which they can run."""
    per_stage = costs.per_stage(schedule.placement)
    place = [0] * schedule.ranks
    found: list[_Step] = []
    for rank, inputs, outputs in run(schedule):
        actions = schedule.actions[rank][place[rank]].actions
        place[rank] += 1
        found.append((rank, sum(per_stage.of(a.op, a.stage) for a in actions), inputs, outputs))
    return found


def _after(free: list[float], steps: list[_Step], comm: float) -> list[float]:
    """When each rank ends a step, given when it may begin."""
    ends = list(free)
    made: dict[int, tuple[int, float]] = {}
    for rank, length, inputs, outputs in steps:
        start = ends[rank]
        for key in inputs:
            maker, end = made[key]
            start = max(start, end if maker == rank else end + comm)
        ends[rank] = start + length
        for key in outputs:
            made[key] = rank, ends[rank]
    return ends
