"""How much a rank keeps at each step. That depends on the order of its actions only, not on their times.

On a rank with v stages, the forward of one microbatch through one stage keeps 1/v until its I, memory_after_I/v until
its W, and nothing after that. What F keeps counts from the start of F. What a backward frees counts until its end, so
an overlapped pair has both at once. The gathered parameters of a sharded stage count from its UNSHARD to its RESHARD.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sternway.schedule._action import Upkeep

if TYPE_CHECKING:
    from sternway.schedule._schedule import Schedule


def memory_steps(
    schedule: "Schedule", rank: int, memory_after_i: float, memory_gathered: float = 0.0
) -> Iterator[tuple[float, float]]:
    """Yield, for each step of a rank, the memory while it runs and the memory after it.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.from_csv("0F0,0I0,0W0")
        >>> list(memory_steps(s, rank=0, memory_after_i=0.5))
        [(1.0, 1.0), (1.0, 0.5), (0.5, 0.0)]
    """
    stages = max(1, len(schedule.placement[rank]))
    # Counts, so that thirds and the like do not drift: microbatches before their I, and between I and W.
    full = split = gathered = 0
    level = 0.0
    for step in schedule.actions[rank]:
        during = level
        for action in step.actions:  # of an overlapped pair, the forward comes first
            if action.op == "F":
                full += 1
                during = (full + split * memory_after_i + gathered * memory_gathered) / stages
            elif action.op == "W":
                split -= 1
            else:
                full -= 1
                split += action.op == "I"
        if isinstance(step, Upkeep):
            gathered += {"UNSHARD": 1, "RESHARD": -1}.get(step.op, 0)
        level = (full + split * memory_after_i + gathered * memory_gathered) / stages
        yield max(during, level) if isinstance(step, Upkeep) else during, level


def peak(schedule: "Schedule", rank: int, memory_after_i: float, memory_gathered: float = 0.0) -> float:
    """Return the most that a rank keeps at any step."""
    # After a step, too: I can leave more than F kept.
    return max(map(max, memory_steps(schedule, rank, memory_after_i, memory_gathered)), default=0.0)


def kept_steps(
    schedule: "Schedule",
    rank: int,
    after_f: Sequence[float],
    after_i: Sequence[float],
    gathered: Sequence[float] | None = None,
) -> Iterator[tuple[float, float]]:
    """``memory_steps`` for stages of unequal size: what F of each keeps, what I leaves of it, what it takes gathered.

    Example:
        >>> from sternway import schedule
        >>> list(kept_steps(schedule.from_csv("0F0,0B0"), 0, [300], [100]))
        [(300, 300), (300, 0)]
    """
    level: float = 0
    for step in schedule.actions[rank]:
        during = level
        for action in step.actions:
            whole, rest = after_f[action.stage], after_i[action.stage]
            if action.op == "F":
                level += whole
                during = level
            elif action.op == "I":
                level += rest - whole
            else:
                level -= rest if action.op == "W" else whole
        if isinstance(step, Upkeep) and gathered is not None:
            level += {"UNSHARD": 1, "RESHARD": -1}.get(step.op, 0) * gathered[step.stage]
            during = max(during, level)
        yield during, level
