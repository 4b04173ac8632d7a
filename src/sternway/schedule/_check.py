"""Can every rank run this schedule to its end? Five rules, and errors that say which is broken and where.

    placed      every action is of a stage that its rank holds, and of a microbatch that there is
    complete    every stage runs every microbatch's F once, and once either B or both I and W
    ordered     on its rank, F comes before I or B, and I before W
    executable  no ranks wait for each other in a circle, also if sends block (see ``_deadlock``)
    in memory   if there is a limit, no rank ever keeps more than that

"step" in a message is a place in ``schedule.actions[rank]``, counted from 0.
"""

from typing import NoReturn

from sternway.errors import ScheduleError
from sternway.schedule._action import Action
from sternway.schedule._costs import Costs
from sternway.schedule._deadlock import find_circle
from sternway.schedule._memory import memory_steps
from sternway.schedule._schedule import Schedule

_NOWHERE = -1

# Room for rounding: 33 activations of a third each are not over a limit of 11.
_TOLERANCE = 1e-9


def check(schedule: Schedule, *, memory_limit: float | None = None, costs: Costs | None = None) -> Schedule:
    """Return the schedule if it keeps the five rules of this module.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("1f1b", ranks=4, microbatches=8)
        >>> check(s, memory_limit=4) is s
        True
        >>> check(s, memory_limit=3)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        sternway.errors.ScheduleError: a rank keeps at most 3 ...; got 4 at 0F3 (rank 0, step 3). Fix: ...

    Args:
        schedule: the schedule.
        memory_limit: the most that a rank may keep, in microbatches of one rank's whole share.
        costs: whose ``memory_after_I`` counts for the limit; without them, I frees nothing.

    Raises:
        ScheduleError: the first rule that is broken, with rank, step, action and fix.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "a Schedule is checked", schedule, "make or read one")
    ScheduleError.unless(
        memory_limit is None or (isinstance(memory_limit, int | float) and memory_limit == memory_limit),
        "memory_limit is a number of microbatches",
        memory_limit,
        "pass 1 or more",
    )
    ScheduleError.unless(costs is None or isinstance(costs, Costs), "costs are a Costs", costs, "pass schedule.Costs()")
    _check_steps(schedule)
    circle = find_circle(schedule)
    if circle is not None:
        raise circle
    if memory_limit is not None:
        _check_memory(schedule, memory_limit, costs or Costs())
    return schedule


def _check_steps(schedule: Schedule) -> None:
    """Placed, complete, ordered: what each rank's own list must keep."""
    m, n = schedule.n_microbatches, schedule.num_stages
    holder = schedule.stage_ranks()
    # The step of each action, by op and then by stage * m + microbatch.
    at = {op: [_NOWHERE] * (n * m) for op in "FIWB"}
    forwards, inputs, weights, wholes = at["F"], at["I"], at["W"], at["B"]
    for rank, steps in enumerate(schedule.actions):
        for index, step in enumerate(steps):
            for action in step.actions:
                stage, op, i = action.stage, action.op, action.microbatch
                if stage >= n or i >= m or holder[stage] != rank:
                    _raise_misplaced(schedule, rank, index, action)
                key = stage * m + i
                if at[op][key] != _NOWHERE:
                    _raise_again(rank, index, action, at[op][key])
                at[op][key] = index
                if op == "F":
                    continue
                if op == "W":
                    before, needs = inputs[key], "I"
                else:
                    before, needs = forwards[key], "F"
                    if inputs[key] != _NOWHERE and wholes[key] != _NOWHERE:
                        _raise_twice(rank, index, action, inputs[key], wholes[key])
                # An overlapped pair runs both at once, so that its F is not before its B.
                if before in (_NOWHERE, index):
                    _raise_too_early(schedule, rank, index, action, needs)
    _check_complete(schedule, holder, forwards, inputs, weights, wholes)


def _check_complete(
    schedule: Schedule,
    holder: tuple[int, ...],
    forwards: list[int],
    inputs: list[int],
    weights: list[int],
    wholes: list[int],
) -> None:
    """Every stage runs every microbatch's F, and B or both I and W."""
    m = schedule.n_microbatches
    for key, (f, b_input, w, b) in enumerate(zip(forwards, inputs, weights, wholes, strict=True)):
        if f != _NOWHERE and (b != _NOWHERE or (b_input != _NOWHERE and w != _NOWHERE)):
            continue
        stage, i = divmod(key, m)
        if f == _NOWHERE:
            missing = Action(stage, "F", i)
        elif b_input == _NOWHERE:
            missing = Action(stage, "B", i)
        else:
            missing = Action(stage, "W", i)
        rank = holder[stage]
        known = {
            "F": "",
            "B": f", though it runs {stage}F{i} (step {f})",
            "W": f" after {stage}I{i} (step {b_input})",
        }
        raise ScheduleError(
            "every stage runs every microbatch's F once, and once either B or both I and W",
            got=f"no {missing} (rank {rank}, {len(schedule.actions[rank])} steps){known[missing.op]}",
            fix=f"add {missing} to rank {rank}" + (", or both its I and W" if missing.op == "B" else ""),
        )


def _raise_misplaced(schedule: Schedule, rank: int, step: int, action: Action) -> NoReturn:
    where = f"{action} (rank {rank}, step {step})"
    if action.microbatch >= schedule.n_microbatches:
        raise ScheduleError(
            f"microbatches count from 0 to {schedule.n_microbatches - 1}",
            got=where,
            fix="remove it, or raise n_microbatches",
        )
    if action.stage >= schedule.num_stages:
        raise ScheduleError(
            f"stages count from 0 to {schedule.num_stages - 1}",
            got=where,
            fix="remove it, or place the stage",
        )
    raise ScheduleError(
        "a rank runs only stages that it holds",
        got=f"{where}, which holds {', '.join(map(str, schedule.placement[rank])) or 'none'}",
        fix=f"move {action} to rank {schedule.rank_of(action.stage)}, or change the placement",
    )


def _raise_again(rank: int, step: int, action: Action, earlier: int) -> NoReturn:
    raise ScheduleError(
        "an action runs once",
        got=f"{action} again (rank {rank}, step {step}), after step {earlier}",
        fix="remove one of them",
    )


def _raise_twice(rank: int, step: int, action: Action, split: int, whole: int) -> NoReturn:
    other, at = ("B", whole) if action.op == "I" else ("I", split)
    stage, i = action.stage, action.microbatch
    raise ScheduleError(
        "a backward runs once, whole as B or split as I and W",
        got=f"{action} (rank {rank}, step {step}) beside {stage}{other}{i} (step {at})",
        fix=f"keep {stage}B{i}, or {stage}I{i} and {stage}W{i}",
    )


def _raise_too_early(schedule: Schedule, rank: int, step: int, action: Action, needs: str) -> NoReturn:
    """Say what should have come before, and where it is instead."""
    stage, i = action.stage, action.microbatch
    wanted = f"{stage}{needs}{i}"
    later = None
    for index, other in enumerate(schedule.actions[rank]):
        if any(str(part) == wanted for part in other.actions):
            later = index
    whole = f"{stage}B{i}"
    if action.op == "W" and any(str(p) == whole for other in schedule.actions[rank] for p in other.actions):
        raise ScheduleError(
            "a backward runs once, whole as B or split as I and W",
            got=f"{action} (rank {rank}, step {step}) beside {whole}",
            fix=f"remove {action}, or replace {whole} by {wanted}",
        )
    place = "nowhere" if later is None else ("in the same step" if later == step else f"at step {later}")
    fix = f"add {wanted} before it" if later is None else f"emit {wanted} first"
    raise ScheduleError(
        f"a stage runs {'F before I or B' if needs == 'F' else 'I before W'} of the same microbatch",
        got=f"{action} (rank {rank}, step {step}) with {wanted} {place}",
        fix=fix + (f", or use {whole} alone" if action.op == "W" else ""),
    )


def _check_memory(schedule: Schedule, limit: float, costs: Costs) -> None:
    """No rank ever keeps more than the limit."""
    for rank, steps in enumerate(schedule.actions):
        levels = memory_steps(steps, stages=max(1, len(schedule.placement[rank])), memory_after_i=costs.memory_after_I)
        for index, (during, after) in enumerate(levels):
            if max(during, after) > limit + _TOLERANCE:
                raise ScheduleError(
                    f"a rank keeps at most {limit:g} microbatches' activations",
                    got=f"{max(during, after):g} at {steps[index]} (rank {rank}, step {index})",
                    fix="run backwards earlier, use a schedule that keeps less (v-half, v-min), "
                    "or search under this limit",
                )
