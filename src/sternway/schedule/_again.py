"""How much of a stage is recomputed: all of it, or some of the blocks that it consists of.

A stage whose forward runs again keeps less, and its backward takes longer, both in proportion to the share that runs
again. A rank that lacks the memory of one block need not pay for a whole forward.

    recompute=(0, (1, 0.5))       all of stage 0, and half of the blocks of stage 1
"""

from collections.abc import Collection, Iterable
from typing import TypeAlias

from sternway.errors import ScheduleError

Again: TypeAlias = int | tuple[int, float]
"""A stage, all of which is recomputed; or a stage and the share of it that is."""

Recompute: TypeAlias = tuple[Again, ...]

_LEVELS = 4


def checked_recompute(stages: object, count: int) -> Recompute:
    """Return what is recomputed of ``count`` stages in order, each stage once, or raise ScheduleError.

    Example:
        >>> checked_recompute([(1, 0.5), 0, (2, 1.0)], 3)
        (0, (1, 0.5), 2)
    """
    found: dict[int, float] = {}
    for each in stages if isinstance(stages, Iterable) else (None,):
        stage, share = each if isinstance(each, list | tuple) and len(each) == 2 else (each, 1.0)
        if type(stage) is not int or not 0 <= stage < count or type(share) not in (int, float) or not 0 < share <= 1:
            raise ScheduleError(
                f"recompute must be stages, numbers from 0 to {count - 1}, or (stage, share) with shares up to 1",
                got=repr(stages),
                fix="pass recompute=[0], or [(0, 0.5)] for half of its blocks",
            )
        found[stage] = max(found.get(stage, 0.0), float(share))
    return tuple(stage if share == 1 else (stage, share) for stage, share in sorted(found.items()))


def shares(recompute: Collection[Again]) -> dict[int, float]:
    """Return the share of each stage that is recomputed, of those of which something is.

    Example:
        >>> shares((0, (1, 0.5)))
        {0: 1.0, 1: 0.5}
    """
    return dict((each, 1.0) if isinstance(each, int) else each for each in recompute)


def with_share(recompute: Recompute, stage: int, share: float) -> Recompute:
    """Return the same with another share of one stage, which may be nothing."""
    found = shares(recompute) | {stage: share}
    return tuple(each if much == 1 else (each, much) for each, much in sorted(found.items()) if much > 0)


def levels(blocks: int) -> tuple[float, ...]:
    """Return the shares of so many blocks that are tried, at most four, the smallest first.

    Example:
        >>> levels(2), levels(8)
        ((0.5, 1.0), (0.25, 0.5, 0.75, 1.0))
    """
    counts = {-(-blocks * level // _LEVELS) for level in range(1, _LEVELS + 1)}
    return tuple(count / blocks for count in sorted(counts)) if blocks else ()


def show_recompute(recompute: Recompute) -> str:
    """Return what is recomputed in words.

    Example:
        >>> show_recompute((0, (1, 0.5)))
        '0, 50% of 1'
    """
    return ", ".join(str(each) if isinstance(each, int) else f"{each[1]:.0%} of {each[0]}" for each in recompute)
