"""Schedules by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap
from sternway.schedule._costs import Placement
from sternway.schedule._schedule import Schedule, check_size, looped_placement, v_placement
from sternway.schedule.named._dualpipe import dualpipe
from sternway.schedule.named._dualpipe_v import dualpipe_v
from sternway.schedule.named._gpipe import gpipe
from sternway.schedule.named._interleaved_1f1b import interleaved_1f1b
from sternway.schedule.named._interleaved_zb import interleaved_zb
from sternway.schedule.named._looped_bfs import looped_bfs
from sternway.schedule.named._one_f_one_b import one_f_one_b
from sternway.schedule.named._v_half import v_half
from sternway.schedule.named._v_min import v_min
from sternway.schedule.named._zb_h1 import zb_h1
from sternway.schedule.named._zb_h2 import zb_h2
from sternway.schedule.named._zb_v import zb_v


@dataclass(frozen=True, slots=True)
class _Generator:
    """Builds each rank's actions for a placement; ``stages_per_rank`` is None where the caller chooses it."""

    build: Callable[[Placement, int], Sequence[Sequence[Action | Overlap]]]
    stages_per_rank: int | None
    copies: int = 1


_GENERATORS = {
    "gpipe": _Generator(gpipe, 1),
    "1f1b": _Generator(one_f_one_b, 1),
    "interleaved-1f1b": _Generator(interleaved_1f1b, None),
    "looped-bfs": _Generator(looped_bfs, None),
    "zb-h1": _Generator(zb_h1, 1),
    "zb-h2": _Generator(zb_h2, 1),
    "interleaved-zb": _Generator(interleaved_zb, None),
    "zb-v": _Generator(zb_v, 2),
    "v-half": _Generator(v_half, 2),
    "v-min": _Generator(v_min, 2),
    "dualpipe-v": _Generator(dualpipe_v, 2),
    "dualpipe": _Generator(dualpipe, 2, copies=2),
}


def names(copies: int = 1) -> tuple[str, ...]:
    """Return the names that ``make`` knows, of schedules for one copy of the model, or for more.

    Example:
        >>> "zb-v" in names()
        True
        >>> names(copies=2)
        ('dualpipe',)
    """
    return tuple(name for name, generator in _GENERATORS.items() if generator.copies == copies)


def make(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Make a schedule by name.

    Example:
        >>> s = make("1f1b", ranks=2, microbatches=2)
        >>> [str(action) for action in s.actions[0]]
        ['0F0', '0F1', '0B0', '0B1']

    Args:
        name: one of ``names()`` or ``names(copies=2)``.
        ranks: the number of ranks, 1 or more.
        microbatches: the number of microbatches in a step, 1 or more.
        stages_per_rank: for the interleaved and looped schedules, 2 unless given; fixed for the others.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not exist for these numbers.
    """
    if not isinstance(name, str) or name not in _GENERATORS:
        fix = f"use one of {', '.join(_GENERATORS)}"
        raise ScheduleError("the schedule's name is not known", got=repr(name), fix=fix)
    given = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for what, value in given.items():
        optional = what == "stages_per_rank" and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ScheduleError(f"{what} must be an int, 1 or more", got=repr(value), fix="pass 1 or more")
    check_size(ranks, microbatches, stages_per_rank or 2)
    generator = _GENERATORS[name]
    fixed = generator.stages_per_rank
    if fixed is not None and stages_per_rank not in (None, fixed):
        others = ", ".join(other for other, g in _GENERATORS.items() if g.stages_per_rank is None)
        raise ScheduleError(
            f"{name} must have {fixed} stage{'s' * (fixed > 1)} per rank",
            got=f"stages_per_rank={stages_per_rank}",
            fix=f"leave it out, or use one of {others}",
        )
    placement = v_placement(ranks) if fixed == 2 else looped_placement(ranks, fixed or stages_per_rank or 2)
    actions = generator.build(placement, microbatches)
    return Schedule(name, microbatches, placement, tuple(map(tuple, actions)), copies=generator.copies)
