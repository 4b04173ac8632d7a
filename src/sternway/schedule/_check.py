"""Can every rank run this schedule to its end? Seven rules; an error says which one is broken, and where.

    placed      every action is of a stage that its rank holds, and of a microbatch that exists
    complete    every stage runs every microbatch's F once, and once either B or both I and W; of several copies of the
                model, every one does so with its own microbatches
    ordered     on its rank, F comes before I or B, and I before W
    moved       what is offloaded comes back: F, OFFLOAD, RELOAD and the backward of a microbatch, in this order
    gathered    a stage with upkeep is gathered when it computes, reduced once after its last backward, and freed
    executable  no ranks wait for each other in a circle, even if sends block (see ``formats/_transfers``)
    in memory   if there is a limit, no rank ever keeps more than that

"step" in a message is an index into ``schedule.actions[rank]``.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

from sternway.errors import ScheduleError
from sternway.schedule._action import OPS, Action, Op
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._depends import KIND, needs, run, step_number
from sternway.schedule._memory import memory_steps
from sternway.schedule._offload import check_moves
from sternway.schedule._schedule import Schedule
from sternway.schedule._upkeep import check_upkeep

Places = dict[Op, list[int]]
"""For each op, the step at which it runs on its rank, by stage * n_microbatches + microbatch; -1 if nowhere."""

_ONCE = "a backward must run once: whole as B, or split as I and W"


def check(
    schedule: Schedule, *, memory_limit: float | Sequence[float] | None = None, costs: Costs | None = None
) -> Schedule:
    """Return the schedule if it keeps the seven rules of this module.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("1f1b", ranks=4, microbatches=8)
        >>> check(s, memory_limit=4) is s
        True
        >>> check(s, memory_limit=3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        sternway.errors.ScheduleError: a rank must keep at most 3 ...; got 4 at 0F3 (rank 0, step 3). Fix: ...

    Args:
        schedule: the schedule.
        memory_limit: the most that a rank may keep, in microbatches of one rank's whole share; one number, or one for
            each rank.
        costs: their ``memory_after_I`` counts for the limit; without costs, I frees nothing.

    Raises:
        ScheduleError: the first rule that is broken, with rank, step, action and fix.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "check needs a Schedule", schedule, "make or read one")
    most = math.inf if memory_limit is None else memory_limit
    limits = list(most) if isinstance(most, Sequence) else [most] * schedule.ranks
    ScheduleError.unless(
        len(limits) == schedule.ranks and all(isinstance(each, int | float) and each == each for each in limits),
        "memory_limit must be a number of microbatches, or one for each rank",
        memory_limit,
        "pass 1 or more",
    )
    ScheduleError.unless(
        costs is None or isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs()"
    )
    _check_complete(schedule, _check_steps(schedule))
    check_upkeep(schedule)
    check_moves(schedule)
    reached = [0] * schedule.ranks
    for rank, _, _ in run(schedule):
        reached[rank] += 1
    if any(count < len(steps) for count, steps in zip(reached, schedule.actions, strict=True)):
        _raise_circle(schedule, reached)
    if memory_limit is not None:
        _check_memory(schedule, limits, costs or Costs())
    return schedule


def _check_steps(schedule: Schedule) -> Places:
    """Check that actions are placed and ordered, and that none runs twice; return where they are."""
    m, n = schedule.n_microbatches, schedule.num_stages
    holder, alone = schedule.stage_ranks(), schedule.copies == 1
    at: Places = {op: [-1] * (n * m) for op in OPS}
    # What an action waits for on its own stage: all that it waits for in a pipeline of one stage.
    own: dict[Op, Op] = {op: OPS[need] for op in OPS for need in needs(1)[KIND[op]]}
    other: dict[Op, Op] = {"I": "B", "B": "I"}
    for rank, steps in enumerate(schedule.actions):
        for index, step in enumerate(steps):
            for action in step.actions:
                stage, op, i = action.stage, action.op, action.microbatch
                if stage >= n or i >= m or holder[stage] != rank or not (alone or schedule.runs(stage, i)):
                    _raise_misplaced(schedule, rank, index, action)
                key, places = stage * m + i, at[op]
                if places[key] >= 0:
                    raise ScheduleError(
                        "an action must run once",
                        got=f"{action} again (rank {rank}, step {index}), after step {places[key]}",
                        fix="remove one of them",
                    )
                places[key] = index
                if op in other and at[other[op]][key] >= 0:
                    beside = f"{stage}{other[op]}{i} (step {at[other[op]][key]})"
                    raise ScheduleError(
                        _ONCE,
                        got=f"{action} (rank {rank}, step {index}) beside {beside}",
                        fix=f"keep {stage}B{i}, or {stage}I{i} and {stage}W{i}",
                    )
                # An overlapped pair runs both at once, so that its F is not before its B.
                if op in own and at[own[op]][key] in (-1, index):
                    _raise_too_early(schedule, rank, index, action, own[op])
    return at


def _check_complete(schedule: Schedule, at: Places) -> None:
    """Check that every stage runs every microbatch's F, and B or both I and W."""
    m = schedule.n_microbatches
    for key, (f, b_input, w, b) in enumerate(zip(*(at[op] for op in OPS), strict=True)):
        if f >= 0 and (b >= 0 or (b_input >= 0 and w >= 0)):
            continue
        stage, i = divmod(key, m)
        if not schedule.runs(stage, i):
            continue
        if f < 0:
            missing, known = Action(stage, "F", i), ""
        elif b_input >= 0:
            missing, known = Action(stage, "W", i), f" after {stage}I{i} (step {b_input})"
        else:
            missing, known = Action(stage, "B", i), f", though it runs {stage}F{i} (step {f})"
        rank = schedule.rank_of(stage)
        raise ScheduleError(
            "every stage must run every microbatch's F once, and once either B or both I and W",
            got=f"no {missing} (rank {rank}, {len(schedule.actions[rank])} steps){known}",
            fix=f"add {missing} to rank {rank}" + (", or both its I and W" if missing.op == "B" else ""),
        )


def _raise_misplaced(schedule: Schedule, rank: int, step: int, action: Action) -> NoReturn:
    where = f"{action} (rank {rank}, step {step})"
    if action.microbatch >= schedule.n_microbatches:
        raise ScheduleError(
            f"a microbatch must be 0 to {schedule.n_microbatches - 1}",
            got=where,
            fix="remove it, or raise n_microbatches",
        )
    if action.stage >= schedule.num_stages:
        raise ScheduleError(
            f"a stage must be 0 to {schedule.num_stages - 1}", got=where, fix="remove it, or place the stage"
        )
    if not schedule.runs(action.stage, action.microbatch):
        raise ScheduleError(
            f"each of {schedule.copies} copies of the model must run its own microbatches",
            got=where,
            fix="remove it; the first copy has the first stages and the first microbatches",
        )
    raise ScheduleError(
        "a rank must run only stages that it holds",
        got=f"{where}, which holds {', '.join(map(str, schedule.placement[rank])) or 'none'}",
        fix=f"move {action} to rank {schedule.rank_of(action.stage)}, or change the placement",
    )


def _raise_too_early(schedule: Schedule, rank: int, step: int, action: Action, need: Op) -> NoReturn:
    """Say what must come before the action, and where it is instead."""
    stage, i = action.stage, action.microbatch
    wanted, whole = Action(stage, need, i), Action(stage, "B", i)
    at = {part: index for index, other in enumerate(schedule.actions[rank]) for part in other.actions}
    where = f"{action} (rank {rank}, step {step})"
    if action.op == "W" and whole in at:
        raise ScheduleError(
            _ONCE, got=f"{where} beside {whole}", fix=f"remove {action}, or replace {whole} by {wanted}"
        )
    later = at.get(wanted)
    place = "nowhere" if later is None else "in the same step" if later == step else f"at step {later}"
    fix = f"{'add' if later is None else 'move'} {wanted} before it"
    raise ScheduleError(
        f"a stage must run {'F before I or B' if need == 'F' else 'I before W'} of the same microbatch",
        got=f"{where} with {wanted} {place}",
        fix=fix + (f", or use {whole} alone" if action.op == "W" else ""),
    )


def _raise_circle(schedule: Schedule, reached: list[int]) -> NoReturn:
    """Follow who waits for whom from a rank that is stuck until a rank comes up again, and describe that circle."""
    holder, sources, m = schedule.stage_ranks(), needs(schedule.num_stages, schedule.copies), schedule.n_microbatches
    step_of = {
        step_number(part) * m + part.microbatch: index
        for steps in schedule.actions
        for index, step in enumerate(steps)
        for part in step.actions
    }
    rank = next(r for r, steps in enumerate(schedule.actions) if reached[r] < len(steps))
    seen: dict[int, int] = {}
    told: list[tuple[str, str]] = []
    while rank not in seen:
        seen[rank] = len(told)
        step = schedule.actions[rank][reached[rank]]
        other, index = next(
            (holder[source // 3], step_of[source * m + part.microbatch])
            for part in step.actions
            for source in sources[step_number(part)]
            if step_of[source * m + part.microbatch] >= reached[holder[source // 3]]
        )
        wanted = schedule.actions[other][index]
        told.append(
            (
                f"{step} (rank {rank}, step {reached[rank]}) waits for {wanted} (rank {other}, step {index})",
                f"on rank {other}, run {wanted} before {schedule.actions[other][reached[other]]}",
            )
        )
        rank = other
    circle = told[seen[rank] :]
    raise ScheduleError(
        "ranks cannot wait for each other in a circle",
        got="a deadlock: " + "; ".join(line for line, _ in circle),
        fix=" or ".join(fix for _, fix in circle[:2]),
    )


def _check_memory(schedule: Schedule, limits: Sequence[float], costs: Costs) -> None:
    """Check that no rank ever keeps more than its limit."""
    for rank, (steps, limit) in enumerate(zip(schedule.actions, limits, strict=True)):
        for index, both in enumerate(memory_steps(schedule, rank, costs)):
            if max(both) > limit + EPSILON:  # 33 activations of a third each are not over a limit of 11
                raise ScheduleError(
                    f"a rank must keep at most {limit:g} microbatches' activations",
                    got=f"{max(both):g} at {steps[index]} (rank {rank}, step {index})",
                    fix="run backwards earlier, use a schedule that keeps less (v-half, v-min), "
                    "or search under this limit",
                )
