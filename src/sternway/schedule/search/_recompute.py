"""Which stages to recompute: every choice has a proven bound, and only those that it does not rule out are searched.

Why: to recompute a stage costs a forward for each microbatch, and only ranks that are short of memory gain from it. In
1F1B the first rank holds as many microbatches as there are ranks, and the last holds one: to recompute all stages, as
is usual, pays for memory where there is enough (arXiv 2402.16831 and others find the same).

    stage 0  1  2  3      bound      span
          .  .  .  .       61         61        the memory is too small to keep ranks busy
          r  r  r  r       40         44        the usual choice
          r  r  .  .       36         37        the best
          r  .  .  .       38          -        cannot be better: not searched

Large problems are not all searched: those that look best at a glance are.
"""

from collections.abc import Callable
from functools import partial

from sternway.errors import ScheduleError
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._schedule import Schedule
from sternway.schedule.search._choices import Choice, choices
from sternway.schedule.search._fuse import length
from sternway.schedule.search._hunt import Progress, glance, part_of
from sternway.schedule.search._lower_bound import bound
from sternway.schedule.search._problem import Limit, Problem, resolve

_TINY = 32  # stages times microbatches: up to this, every choice is searched that its bound does not rule out
_GLANCES, _SEARCHED = 12, 2  # of larger problems, how many choices are looked at, and how many searched


def best_choice(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    limit: Limit,
    find: Callable[[Choice, Progress | None], Schedule],
    progress: Progress | None,
) -> Schedule:
    """Return the best schedule over the choices; ``find`` searches for one of them.

    Raises:
        ScheduleError: not even one microbatch fits, whatever is recomputed.
    """
    posed = partial(resolve, costs, placement, microbatches, limit, joined=True)
    least: dict[Choice, float] = {}
    for choice in choices(placement):
        try:
            least[choice] = bound(posed(recompute=choice))
        except ScheduleError as error:
            problem = error
    if not least:
        raise problem
    order = sorted(least, key=lambda choice: (least[choice], len(choice), choice))
    if sum(map(len, placement)) * microbatches > _TINY:
        order = _promising(order, least, posed)
    found: list[tuple[tuple[float, float], int, Schedule]] = []
    for number, choice in enumerate(order):
        if not found or least[choice] < min(found, key=_rank)[0][0] * (1 - EPSILON):
            plan = find(choice, part_of(progress, number, len(order)))
            found.append((length(plan, costs), len(choice), plan))
    if progress is not None:
        progress(1, 1)
    return min(found, key=_rank)[2]


def _promising(order: list[Choice], least: dict[Choice, float], posed: Callable[..., Problem]) -> list[Choice]:
    """Return the choices that look best at a glance, of those whose bounds are lowest."""
    spans: dict[Choice, float] = {}
    for choice in order[:_GLANCES]:
        if not spans or least[choice] < min(spans.values()):
            spans[choice] = glance(posed(recompute=choice))
    return sorted(spans, key=lambda choice: (spans[choice], len(choice)))[:_SEARCHED]


def _rank(found: tuple[tuple[float, float], int, Schedule]) -> tuple[tuple[float, float], int]:
    """What is best: the shortest; among equals, the one that recomputes least."""
    return found[0], found[1]
