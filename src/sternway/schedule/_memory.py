"""How much a rank keeps at each step. That depends on the order of its actions only, not on their times.

Each stage has its own amounts: what its F keeps until I, what I leaves until W, what a backward takes while it runs (a
recomputed stage then has its activations again), and what its parameters take from UNSHARD to RESHARD. Between OFFLOAD
and RELOAD a microbatch takes only what stays of it. What F keeps counts from the start of F. What a backward frees
counts until its end, so an overlapped pair has both at once.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sternway.schedule._action import MOVES, Upkeep
from sternway.schedule._costs import Costs

if TYPE_CHECKING:
    from sternway.schedule._action import Step
    from sternway.schedule._schedule import Schedule

_SIGN = {"UNSHARD": 1, "RESHARD": -1, "REDUCE_GRAD": 0, "OFFLOAD": -1, "RELOAD": 1}
_DIGITS = 12  # thirds and the like must not drift


def memory_steps(schedule: "Schedule", rank: int, costs: Costs) -> Iterator[tuple[float, float]]:
    """Yield, for each step of a rank, the memory while it runs and the memory after it.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.from_csv("0F0,0I0,0W0")
        >>> list(memory_steps(s, 0, Costs(memory_after_I=0.5)))
        [(1.0, 1.0), (1.0, 0.5), (0.5, 0.0)]
    """
    each = costs.per_stage(schedule.placement, schedule.recompute, schedule.copies)
    for during, after in kept_by(schedule.actions[rank], *each.amounts):
        yield round(during, _DIGITS), round(after, _DIGITS)


def peak(schedule: "Schedule", rank: int, costs: Costs) -> float:
    """Return the most that a rank keeps at any step."""
    # After a step, too: I can leave more than F kept.
    return max(map(max, memory_steps(schedule, rank, costs)), default=0.0)


def kept_by(
    steps: "Sequence[Step]",
    after_f: Sequence[float],
    after_i: Sequence[float],
    gathered: Sequence[float] | None = None,
    works: Sequence[float] | None = None,
    away: Sequence[float] | None = None,
) -> Iterator[tuple[float, float]]:
    """``memory_steps`` of any steps, in given amounts.

    These are what F of each stage keeps, what I leaves of it, what the stage takes gathered, what its backward takes
    beyond what F kept, and what stays of what is offloaded.

    Example:
        >>> from sternway import schedule
        >>> list(kept_by(schedule.from_csv("0F0,0B0").actions[0], [300], [100]))
        [(300, 300), (300, 0)]
    """
    level: float = 0
    for step in steps:
        during = level
        for action in step.actions:
            whole, rest = after_f[action.stage], after_i[action.stage]
            if action.op == "F":
                level += whole
                during = level
            elif action.op == "W":
                level -= rest
            else:
                during += works[action.stage] if works is not None else 0
                level += rest - whole if action.op == "I" else -whole
        if isinstance(step, Upkeep):
            if step.op in MOVES:
                amount = max(0, after_f[step.stage] - (away[step.stage] if away is not None else 0))
            else:
                amount = gathered[step.stage] if gathered is not None else 0
            level += _SIGN[step.op] * amount
            during = max(during, level)
        yield during, level
