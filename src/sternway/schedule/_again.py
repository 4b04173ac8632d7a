"""How much of a stage is recomputed: all of it, or some of the blocks that it consists of, each whole or selectively.

A block that is recomputed whole keeps its input alone, and runs its forward again. One that is recomputed selectively
keeps what products, convolutions and attention computed, and does the rest again, which is cheap: it frees less, and
costs much less time. A rank that lacks the memory of one block need not pay for a whole forward.

    recompute=(0, (1, 0.5), (2, 0.25, 0.75))
        all of stage 0, half of the blocks of stage 1; a quarter of those of stage 2, and the other three selectively
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

from sternway.errors import ScheduleError

Again: TypeAlias = int | tuple[int, float] | tuple[int, float, float]
"""A stage, all of which is recomputed; or a stage, and the shares of its blocks that are, whole and selectively."""

Recompute: TypeAlias = tuple[Again, ...]

_LEVELS = 4
_ROUNDING = 1e-9


class Share(NamedTuple):
    """How much of a stage is recomputed. Of two shares, the larger one takes longer and keeps less."""

    whole: float = 0.0
    """The share of its blocks that run again."""
    selective: float = 0.0
    """The share of its blocks of which only cheap operations run again."""

    def of(self, stage: int) -> Again:
        """The same as an entry of ``recompute``."""
        if self.selective:
            return stage, self.whole, self.selective
        return stage if self.whole == 1 else (stage, self.whole)


NOTHING = Share()


def checked_recompute(stages: object, count: int) -> Recompute:
    """Return what is recomputed of ``count`` stages in order, each stage once, or raise ScheduleError.

    Example:
        >>> checked_recompute([(1, 0.5), 0, (2, 1.0), (3, 0, 1)], 4)
        (0, (1, 0.5), 2, (3, 0.0, 1.0))
    """
    found: dict[int, Share] = {}
    for each in stages if isinstance(stages, Iterable) else (None,):
        stage, *rest = each if isinstance(each, list | tuple) and len(each) in (2, 3) else (each, 1.0)
        numbers = all(type(much) in (int, float) and much >= 0 for much in rest)
        if type(stage) is not int or not 0 <= stage < count or not numbers or not 0 < sum(rest) <= 1 + _ROUNDING:
            raise ScheduleError(
                f"recompute must be stages, numbers from 0 to {count - 1}, or (stage, share) or (stage, share, share "
                "selectively), with shares up to 1",
                got=repr(stages),
                fix="pass recompute=[0], [(0, 0.5)] for half of its blocks, or [(0, 0, 1)] for all of them selectively",
            )
        found[stage] = max(found.get(stage, NOTHING), Share(*map(float, rest)))
    return tuple(share.of(stage) for stage, share in sorted(found.items()))


def shares(recompute: Collection[Again]) -> dict[int, Share]:
    """Return the share of each stage that is recomputed, of those of which something is.

    Example:
        >>> shares((0, (1, 0.5)))
        {0: Share(whole=1.0, selective=0.0), 1: Share(whole=0.5, selective=0.0)}
    """
    return dict((each, Share(1.0)) if isinstance(each, int) else (each[0], Share(*each[1:])) for each in recompute)


def with_share(recompute: Recompute, stage: int, share: Share) -> Recompute:
    """Return the same with another share of one stage, which may be nothing."""
    found = shares(recompute) | {stage: share}
    return tuple(much.of(each) for each, much in sorted(found.items()) if much != NOTHING)


def levels(blocks: int, *, selective: bool = False) -> tuple[Share, ...]:
    """Return the shares of so many blocks that are tried, at most four, the smallest first.

    With ``selective`` these come after half and all of the blocks selectively, and the rest of the blocks stays so.

    Example:
        >>> [share.whole for share in levels(8)]
        [0.25, 0.5, 0.75, 1.0]
        >>> [tuple(share) for share in levels(2, selective=True)]
        [(0.0, 0.5), (0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]
    """
    counts = sorted({-(-blocks * level // _LEVELS) for level in range(1, _LEVELS + 1)}) if blocks else []
    if not selective:
        return tuple(Share(count / blocks) for count in counts)
    some = sorted({-(-blocks // 2), blocks}) if blocks else []
    mixed = (Share(count / blocks, (blocks - count) / blocks) for count in counts)
    return (*(Share(0.0, count / blocks) for count in some), *mixed)


def show_recompute(recompute: Recompute) -> str:
    """Return what is recomputed in words.

    Example:
        >>> show_recompute((0, (1, 0.5), (2, 0.25, 0.75)))
        '0, 50% of 1, 25% of 2 and 75% selectively'
    """
    return ", ".join(_shown(stage, share) for stage, share in shares(recompute).items())


def _shown(stage: int, share: Share) -> str:
    if share == Share(1.0):
        return str(stage)
    if not share.whole:
        return f"{share.selective:.0%} of {stage} selectively"
    return f"{share.whole:.0%} of {stage}" + (f" and {share.selective:.0%} selectively" if share.selective else "")
