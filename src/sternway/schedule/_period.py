"""What does a step cost when steps follow each other, and no barrier separates them?

Each rank begins the next step as soon as it has ended its own part of this one. So the times at which ranks end a step
follow from those at which they ended the one before, in the same way every time:

    rank 0  |── step 1 ──|── step 2 ──|── step 3 ──|           ends[n + 1] = after(ends[n])
    rank 1     |── step 1 ──|── step 2 ──|── step 3 ──|        after() takes only sums and maxima

Between two steps a rank takes ``Costs.turn``. Such times end in a pattern that repeats (max-plus linear systems): some
steps later, all ranks are later by the same amount. That amount, for one step, is the period. Where stages are sharded,
a rank ends a step when its last reduction has, since the optimizer waits for that.

If equal actions do not take equal time (``Costs.spread``), some rank is always late, and the others wait for it: on
average a step takes longer than with the means of all times, and never less. Then many steps are run with times drawn
about these means. Draws are the same for the same action of every schedule, so that schedules differ by their order
alone.
"""

import math
from collections.abc import Callable, Sequence
from random import Random

from sternway.schedule._action import Step, Upkeep
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._depends import run
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import LINKS, upkeep_time
from sternway.schedule._stage_costs import StageCosts
from sternway.schedule._wires import Wires

_MOST = 64  # steps to look for the pattern; then the average of the second half counts
_FEWEST, _BUDGET = 8, 40_000  # with a spread: steps at least, and actions that are timed

_Ends = list[float]  # when each rank ends a step
_Paces = Sequence[float]  # how much longer than the mean each action takes, as ``step * n_microbatches + microbatch``


def period_of(schedule: Schedule, costs: Costs) -> float:
    """The time of a step among many, for a schedule that runs to its end."""
    per_stage = costs.per_stage(schedule.placement, schedule.recompute, schedule.copies)
    steps, actions = _steps(schedule, per_stage), 3 * schedule.num_stages * schedule.n_microbatches

    wires = Wires(schedule, per_stage)

    def after(before: _Ends, paces: _Paces) -> _Ends:
        return [end + costs.turn for end in _after(before, steps, wires, paces)]

    begin, mean = [0.0] * schedule.ranks, [1.0] * actions
    even = _until_it_repeats(begin, lambda before: after(before, mean))
    if not costs.spread:
        return even
    count = max(_FEWEST, min(_MOST, _BUDGET // len(steps)))
    return max(even, _average(begin, after, _drawn(costs.spread, actions, count)))


def _until_it_repeats(begin: _Ends, after: Callable[[_Ends], _Ends]) -> float:
    ends = [begin]
    for number in range(1, _MOST + 1):
        ends.append(after(ends[-1]))
        for earlier in range(number - 1, -1, -1):
            shifts = [now - then for now, then in zip(ends[number], ends[earlier], strict=True)]
            if max(shifts) - min(shifts) <= EPSILON * max(shifts):
                return max(shifts) / (number - earlier)
    half = _MOST // 2
    return (max(ends[-1]) - max(ends[half])) / (_MOST - half)


def _average(begin: _Ends, after: Callable[[_Ends, _Paces], _Ends], drawn: Sequence[_Paces]) -> float:
    ends = [begin]
    for paces in drawn:
        ends.append(after(ends[-1], paces))
    first = len(drawn) // 8  # until all ranks are under way
    return (max(ends[-1]) - max(ends[first])) / (len(drawn) - first)


def _drawn(spread: float, actions: int, steps: int) -> list[list[float]]:
    """Paces for each step, about 1 and never below 0; those of one action have the mean 1."""
    sigma, random = math.sqrt(math.log1p(spread**2)), Random(0)
    rows = [[random.lognormvariate(0.0, sigma) for _ in range(actions)] for _ in range(steps)]
    means = [math.fsum(column) / steps for column in zip(*rows, strict=True)]
    return [[pace / mean for pace, mean in zip(row, means, strict=True)] for row in rows]


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


def _after(free: _Ends, steps: list[_Timed], wires: Wires, paces: _Paces) -> _Ends:
    """When each rank ends a step, given when it may begin."""
    wires.clear()
    arrived = wires.arrived
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
            start = max(start, end if maker == rank else arrived[key])
        for action in step.actions:
            which = action.stage, action.microbatch
            start = max(start, gathered.get(action.stage, 0.0), back.get(which, 0.0))
        ends[rank] = start + length * paces[outputs[0]]
        for action in step.actions:
            if action.op == "F":
                forwards[action.stage, action.microbatch] = ends[rank]
        for key in outputs:
            made[key] = rank, ends[rank]
        wires.send(rank, outputs, ends[rank])
    return [max(all_links) for all_links in zip(ends, *links.values(), strict=True)]
