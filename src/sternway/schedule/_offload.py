"""Which microbatches are away between F and their backward: a pass over any schedule, within a memory limit.

Why: what F keeps is not needed until the backward, which comes much later on the first ranks. To move it to the host
and back takes a link, not the rank, and a link has time for some of it. Moving those that wait longest first, peak
memory falls faster than the share that is moved (PipeOffload, arXiv 2503.01328).

    rank 0   F0   F1   F2        B0   F3   B1
    out         |--O0--|--O1--|                      [1] the copy begins when F ends
                       ^ 0OFFLOAD0                   [2] here it must be gone: F2 has its room
    back                   |--L0--|                  [3] it comes back one step before its backward

How late [2] may be and how early [3] costs memory, and hides more of the time: a few ways are tried, and for each rank
as few microbatches are moved as fit. Among ways that take equally long, the one with the fewest moves is taken.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from sternway.errors import ScheduleError
from sternway.schedule._action import MOVES, Action, Step, Upkeep
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._memory import kept_by
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate

_WAYS = ((1, 1), (0, 1), (-1, 1), (1, 0), (0, 0), (-1, 0))
"""How many F may run before it is gone, -1 for no step at all; and how many steps ahead it comes back."""


def offloaded(schedule: Schedule, costs: Costs, *, memory_limit: float | Sequence[float] | None) -> Schedule:
    """Return the schedule with OFFLOAD and RELOAD of as many microbatches as make it fit, in the way that takes least.

    Example:
        >>> from sternway import schedule
        >>> costs = Costs(offload=0.5)
        >>> s = schedule.offloaded(schedule.make("1f1b", ranks=2, microbatches=2), costs, memory_limit=1)
        >>> s.simulate(costs).peak_memory
        1.0
        >>> print(s)
        1f1b: 2 ranks, 2 microbatches, 2 stages
        rank 0: 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0B0 0RELOAD1 0B1
        rank 1: 1F0 1B0 1F1 1B1

    Args:
        schedule: the schedule; what it moves already is placed anew.
        costs: their ``offload`` is the time that a move takes.
        memory_limit: what a rank may keep; one number, or one for each rank. None to move all that can be, in the way
            that keeps least.

    Raises:
        ScheduleError: it does not fit even if all that could be is moved.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "offloaded needs a Schedule", schedule, "make or read one")
    ScheduleError.unless(isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(offload=0.5)")
    plain = without_moves(schedule)
    if memory_limit is None:
        return _smallest(plain, costs)
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * plain.ranks
    if len(limits) != plain.ranks:
        raise ScheduleError(
            "memory_limit must be one number, or one for each rank", got=repr(memory_limit), fix="pass one number"
        )
    amounts = costs.per_stage(plain.placement, plain.recompute, plain.copies).amounts
    found: list[tuple[tuple[float, float, int], int, Schedule]] = []
    for way in _WAYS:
        rows = [_fewest(steps, amounts, limit, way) for steps, limit in zip(plain.actions, limits, strict=True)]
        if all(row is not None for row in rows):
            made = replace(plain, actions=tuple(row for row in rows if row is not None))
            timeline = simulate(made, costs)
            found.append(((timeline.span, timeline.makespan, sum(map(len, made.actions))), len(found), made))
    if not found:
        raise ScheduleError(
            f"{schedule.name} cannot stay within the memory limit, however much is offloaded",
            got=f"memory_limit={memory_limit!r}",
            fix=f"pass {simulate(_smallest(plain, costs), costs).peak_memory:g} or more, or recompute stages",
        )
    return min(found, key=lambda each: each[:2])[2]


def _smallest(plain: Schedule, costs: Costs) -> Schedule:
    """Return the schedule with all moves, in the way that keeps least on the fullest rank."""
    rows = ([_placed(steps, dict(_waits(steps)), way) for steps in plain.actions] for way in _WAYS)
    made = [replace(plain, actions=tuple(each)) for each in rows]
    return min(made, key=lambda each: simulate(each, costs).peak_memory)


def without_moves(schedule: Schedule) -> Schedule:
    """Return the schedule without OFFLOAD and RELOAD."""
    if not any(_is_move(step) for steps in schedule.actions for step in steps):
        return schedule
    rows = (tuple(step for step in steps if not _is_move(step)) for steps in schedule.actions)
    return replace(schedule, actions=tuple(rows))


def _is_move(step: Step) -> bool:
    return isinstance(step, Upkeep) and step.op in MOVES


def _fewest(
    steps: Sequence[Step], amounts: Sequence[Sequence[float]], limit: float, way: tuple[int, int]
) -> tuple[Step, ...] | None:
    """Return a rank's steps with the fewest moves that fit; None if all of them do not."""
    waits = _waits(steps)

    def fits(count: int) -> bool:
        row = _placed(steps, dict(waits[:count]), way)
        return max(map(max, kept_by(row, *amounts)), default=0.0) <= limit + EPSILON

    # Each move frees something and takes nothing, so that all larger numbers fit, too.
    count = bisect_left(range(len(waits) + 1), True, key=fits)
    return _placed(steps, dict(waits[:count]), way) if count <= len(waits) else None


def _waits(steps: Sequence[Step]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return (stage, microbatch) with the steps of its F and its backward, those that wait longest first."""
    begun: dict[tuple[int, int], int] = {}
    found = []
    for index, step in enumerate(steps):
        for action in step.actions:
            which = action.stage, action.microbatch
            if action.op == "F":
                begun[which] = index
            elif action.is_backward and index - begun.get(which, index) > 1:  # else nothing happens meanwhile
                found.append((which, (begun[which], index)))
    return sorted(found, key=lambda each: (each[1][0] - each[1][1], each[1][0]))


def _placed(
    steps: Sequence[Step], moved: dict[tuple[int, int], tuple[int, int]], way: tuple[int, int]
) -> tuple[Step, ...]:
    """Return the steps with the moves of these microbatches."""
    forwards = [index for index, step in enumerate(steps) if any(action.op == "F" for action in step.actions)]
    before: dict[int, list[Step]] = {}
    for (stage, number), (begun, turned) in moved.items():
        first, end = bisect_right(forwards, begun), bisect_left(forwards, turned)  # of those between F and backward
        gone = forwards[min(first + way[0], end - 1)] if first < end and way[0] >= 0 else begun + 1
        back = max(gone, turned - way[1])
        before.setdefault(gone, []).append(Upkeep(stage, "OFFLOAD", number))
        before.setdefault(back, []).append(Upkeep(stage, "RELOAD", number))
    # What leaves makes room for what comes back.
    order = {index: sorted(moves, key=lambda move: MOVES.index(move.op)) for index, moves in before.items()}  # type: ignore[union-attr]
    return tuple(each for index, step in enumerate(steps) for each in (*order.get(index, ()), step))


def check_moves(schedule: Schedule) -> None:
    """Check that F, OFFLOAD, RELOAD and the backward of a microbatch follow each other, where there are moves.

    Raises:
        ScheduleError: they do not, with rank and step.
    """
    if without_moves(schedule) is schedule:
        return
    for rank, steps in enumerate(schedule.actions):
        where: dict[tuple[int, int | None], str] = {}
        for index, step in enumerate(steps):
            if isinstance(step, Upkeep) and step.op in MOVES:
                which, needed = (step.stage, step.microbatch), "F" if step.op == "OFFLOAD" else "OFFLOAD"
                if where.get(which) != needed:
                    raise _misplaced(step, rank, index, f"after {where.get(which, 'nothing')}", needed)
                where[which] = step.op
            for action in step.actions:
                if action.is_backward and where.get((action.stage, action.microbatch)) == "OFFLOAD":
                    raise _misplaced(action, rank, index, "of what is away", "RELOAD")
                where[action.stage, action.microbatch] = action.op


def _misplaced(step: Action | Upkeep, rank: int, index: int, how: str, needed: str) -> ScheduleError:
    return ScheduleError(
        "a microbatch must run F, OFFLOAD, RELOAD and its backward in this order",
        got=f"{step} (rank {rank}, step {index}) {how}",
        fix=f"put {step.stage}{needed}{step.microbatch} before it; schedule.offloaded() places all of them",
    )
