"""What does a step cost when steps follow each other, and no barrier separates them?

Each rank begins the next step as soon as it has ended its own part of this one. So the times at which ranks end a step
follow from those at which they ended the one before, in the same way every time:

    rank 0  |── step 1 ──|── step 2 ──|── step 3 ──|           ends[n + 1] = after(ends[n])
    rank 1     |── step 1 ──|── step 2 ──|── step 3 ──|        after() takes only sums and maxima

Between two steps a rank takes ``Costs.turn``. Such times end in a pattern that repeats (max-plus linear systems): some
steps later, all ranks are later by the same amount. That amount, for one step, is the period. Where stages are sharded,
a rank ends a step when its last reduction has, since the optimizer waits for that.
"""

from collections.abc import Sequence

from sternway.schedule._action import Step, Upkeep
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._depends import run
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import LINKS, upkeep_time
from sternway.schedule._stage_costs import StageCosts

_MOST = 64  # steps to look for the pattern; then the average of the second half counts


def period_of(schedule: Schedule, costs: Costs) -> float:
    """The time of a step among many, for a schedule that runs to its end."""
    per_stage = costs.per_stage(schedule.placement, schedule.recompute, schedule.copies)
    steps = _steps(schedule, per_stage)
    ends = [[0.0] * schedule.ranks]
    for number in range(1, _MOST + 1):
        ends.append([end + costs.turn for end in _after(ends[-1], steps, per_stage.comm)])
        for earlier in range(number - 1, -1, -1):
            shifts = [now - then for now, then in zip(ends[number], ends[earlier], strict=True)]
            if max(shifts) - min(shifts) <= EPSILON * max(shifts):
                return max(shifts) / (number - earlier)
    half = _MOST // 2
    return (max(ends[-1]) - max(ends[half])) / (_MOST - half)


_Timed = tuple[int, Step, float, list[int], list[int]]  # rank, step, length, what it waits for, what it computes


def _steps(schedule: Schedule, costs: StageCosts) -> list[_Timed]:
    """Every step of every rank, in an order in which they can run."""
    place = [0] * schedule.ranks
    found: list[_Timed] = []
    for rank, inputs, outputs in run(schedule):
        step = schedule.actions[rank][place[rank]]
        place[rank] += 1
        found.append((rank, step, _length(step, costs), inputs, outputs))
    return found


def _length(step: Step, costs: StageCosts) -> float:
    if isinstance(step, Upkeep):
        return upkeep_time(step, costs)
    return costs.time(step)


def _after(free: list[float], steps: list[_Timed], comm: Sequence[Sequence[float]]) -> list[float]:
    """When each rank ends a step, given when it may begin."""
    ends, links = list(free), {link: list(free) for link in set(LINKS.values())}
    made: dict[int, tuple[int, float]] = {}
    gathered: dict[int, float] = {}
    forwards: dict[tuple[int, int], float] = {}  # when F of a microbatch ended
    back: dict[tuple[int, int], float] = {}  # when it was reloaded
    for rank, step, length, inputs, outputs in steps:
        start = ends[rank]
        if isinstance(step, Upkeep):
            link, which = links[LINKS[step.op]], (step.stage, step.microbatch or 0)
            if step.op != "RESHARD":
                link[rank] = max(forwards[which] if step.op == "OFFLOAD" else start, link[rank]) + length
            if step.op == "UNSHARD":
                gathered[step.stage] = link[rank]
            elif step.op == "OFFLOAD":
                ends[rank] = max(start, link[rank])
            elif step.op == "RELOAD":
                back[which] = link[rank]
            continue
        for key in inputs:
            maker, end = made[key]
            start = max(start, end + comm[maker][rank])
        for action in step.actions:
            which = action.stage, action.microbatch
            start = max(start, gathered.get(action.stage, 0.0), back.get(which, 0.0))
        ends[rank] = start + length
        for action in step.actions:
            if action.op == "F":
                forwards[action.stage, action.microbatch] = ends[rank]
        for key in outputs:
            made[key] = rank, ends[rank]
    return [max(all_links) for all_links in zip(ends, *links.values(), strict=True)]
