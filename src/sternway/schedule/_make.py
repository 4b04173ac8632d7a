"""Schedules by name."""

from collections.abc import Callable
from dataclasses import dataclass

from sternway.errors import ScheduleError
from sternway.schedule._dualpipe_v import dualpipe_v
from sternway.schedule._gpipe import gpipe
from sternway.schedule._interleaved_1f1b import interleaved_1f1b
from sternway.schedule._interleaved_zb import interleaved_zb
from sternway.schedule._looped_bfs import looped_bfs
from sternway.schedule._one_f_one_b import one_f_one_b
from sternway.schedule._schedule import Schedule, check_size
from sternway.schedule._v_half import v_half
from sternway.schedule._v_min import v_min
from sternway.schedule._zb_h1 import zb_h1
from sternway.schedule._zb_h2 import zb_h2
from sternway.schedule._zb_v import zb_v


@dataclass(frozen=True, slots=True)
class _Kind:
    """A generator, and how many stages a rank it makes: ``None`` where the caller chooses."""

    build: Callable[..., Schedule]
    stages_per_rank: int | None


_KINDS = {
    "gpipe": _Kind(gpipe, 1),
    "1f1b": _Kind(one_f_one_b, 1),
    "interleaved-1f1b": _Kind(interleaved_1f1b, None),
    "looped-bfs": _Kind(looped_bfs, None),
    "zb-h1": _Kind(zb_h1, 1),
    "zb-h2": _Kind(zb_h2, 1),
    "interleaved-zb": _Kind(interleaved_zb, None),
    "zb-v": _Kind(zb_v, 2),
    "v-half": _Kind(v_half, 2),
    "v-min": _Kind(v_min, 2),
    "dualpipe-v": _Kind(dualpipe_v, 2),
}


def names() -> tuple[str, ...]:
    """Return the names that ``make`` knows.

    Example:
        >>> "zb-v" in names()
        True
    """
    return tuple(_KINDS)


def make(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Make a schedule by name.

    Example:
        >>> s = make("1f1b", ranks=2, microbatches=2)
        >>> [str(action) for action in s.actions[0]]
        ['0F0', '0F1', '0B0', '0B1']

    Args:
        name: one of ``names()``.
        ranks: how many ranks the pipeline has, 1 or more.
        microbatches: how many microbatches a step has, 1 or more.
        stages_per_rank: for the interleaved and looped schedules, 2 unless given; fixed for the others.

    Raises:
        ScheduleError: an unknown name, or numbers with which this schedule does not work.
    """
    if not isinstance(name, str) or name not in _KINDS:
        raise ScheduleError("a schedule has a known name", got=repr(name), fix=f"use one of {', '.join(_KINDS)}")
    given = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for what, value in given.items():
        optional = what == "stages_per_rank" and value is None
        if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ScheduleError(f"{what} is a whole number, 1 or more", got=repr(value), fix="pass 1 or more")
    check_size(ranks, microbatches, stages_per_rank or 2)
    kind = _KINDS[name]
    if kind.stages_per_rank is None:
        return kind.build(ranks, microbatches, stages_per_rank or 2)
    if stages_per_rank not in (None, kind.stages_per_rank):
        several = ", ".join(other for other, k in _KINDS.items() if k.stages_per_rank is None)
        raise ScheduleError(
            f"{name} has {kind.stages_per_rank} stage(s) a rank",
            got=f"stages_per_rank={stages_per_rank}",
            fix=f"leave it out, or use one of {several}",
        )
    return kind.build(ranks, microbatches)
