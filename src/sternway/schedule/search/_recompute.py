"""What to recompute: every choice has a proven bound, and only those that it does not rule out are searched.

Why: to recompute a stage costs a forward for each microbatch, and only ranks that are short of memory gain from it. In
1F1B the first rank holds as many microbatches as there are ranks, and the last holds one: to recompute all stages, as
is usual, pays for memory where there is enough (arXiv 2402.16831 and others find the same).

    stage 0  1  2  3      bound      span
          .  .  .  .       61         61        the memory is too small to keep ranks busy
          r  r  r  r       40         44        the usual choice
          r  r  .  .       36         37        the best
          r  .  .  .       38          -        cannot be better: not searched

A stage of several blocks may recompute some of them, whole or selectively (``_again``). Of large problems not all
choices are searched: those that look best at a glance are, and what looks better when some stages recompute more or
less. Then as little is recomputed as their order of actions has room for (``recomputed``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from sternway.errors import ScheduleError
from sternway.schedule._again import NOTHING, Recompute, Share, shares, with_share
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._memory import peak
from sternway.schedule._schedule import Schedule
from sternway.schedule.search._choices import amount, choices
from sternway.schedule.search._fuse import length
from sternway.schedule.search._hunt import Progress, glance, part_of
from sternway.schedule.search._lower_bound import bound
from sternway.schedule.search._problem import Limit, Problem, resolve

Levels = tuple[Share, ...]
_Found = tuple[tuple[float, float], Share, Schedule]  # how long it takes, how much is recomputed, and the plan
_TINY = 32  # stages times microbatches: up to this, every choice is searched that its bound does not rule out
_GLANCES, _SEARCHED = 12, 2  # of larger problems, how many choices are looked at, and how many searched


def best_choice(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    limit: Limit,
    find: Callable[[Recompute, Progress | None], Schedule],
    progress: Progress | None,
) -> Schedule:
    """Return the best schedule over the choices; ``find`` searches for one of them.

    Raises:
        ScheduleError: not even one microbatch fits, whatever is recomputed.
    """
    posed = partial(resolve, costs, placement, microbatches, limit, joined=True)
    least: dict[Recompute, float] = {}
    for choice in choices(placement, costs):
        try:
            least[choice] = bound(posed(recompute=choice))
        except ScheduleError as error:
            problem = error
    if not least:
        raise problem
    order = sorted(least, key=lambda choice: (least[choice], amount(choice)))
    tiny = sum(map(len, placement)) * microbatches <= _TINY
    if not tiny:
        order = _promising(order, least, posed, costs.levels(sum(map(len, placement))))
    found: list[_Found] = []
    for number, choice in enumerate(order):
        # Of a large problem, less may be recomputed than was chosen, for which this is no bound.
        if not found or not tiny or least[choice] < min(found, key=_rank)[0][0] * (1 - EPSILON):
            plan = recomputed(find(choice, part_of(progress, number, len(order))), costs, memory_limit=limit)
            found.append((length(plan, costs), amount(plan.recompute), plan))
    if progress is not None:
        progress(1, 1)
    return min(found, key=_rank)[2]


def _promising(
    order: list[Recompute], least: dict[Recompute, float], posed: Callable[..., Problem], levels: Sequence[Levels]
) -> list[Recompute]:
    """Return the choices that look best at a glance, of those whose bounds are lowest, and what looks better nearby."""

    def glanced(some: Iterable[Recompute]) -> dict[Recompute, float]:
        spans: dict[Recompute, float] = {}
        for choice in islice(some, _GLANCES):
            if not spans or least[choice] < min(spans.values()):
                spans[choice] = glance(posed(recompute=choice))
        best = sorted(spans, key=lambda choice: (spans[choice], amount(choice)))
        return {choice: spans[choice] for choice in best[:_SEARCHED]}

    best = glanced(order)
    if all(len(each) <= 1 for each in levels):
        return list(best)
    whole = glanced(choice for choice in order if all(isinstance(each, int) for each in choice))
    nearby = [_nearby(*next(iter(those.items())), posed, levels) for those in (best, whole) if those]
    return list(dict.fromkeys([*nearby, *best, *whole]))


def _nearby(choice: Recompute, span: float, posed: Callable[..., Problem], levels: Sequence[Levels]) -> Recompute:
    """Return a choice that looks better at a glance: stage by stage, more or less is recomputed."""
    for stage, each in enumerate(levels):
        steps = (NOTHING, *each)
        place = steps.index(shares(choice).get(stage, NOTHING))
        for share in (*steps[:place], *steps[place + 1 :]):
            other = with_share(choice, stage, share)
            try:
                problem = posed(recompute=other)
            except ScheduleError:  # not even one microbatch
                continue
            if bound(problem) < span * (1 - EPSILON) and (seen := glance(problem)) < span * (1 - EPSILON):
                choice, span = other, seen
    return choice


def _rank(found: _Found) -> tuple[tuple[float, float], Share]:
    """What is best: the shortest; among equals, the one that recomputes least."""
    return found[0], found[1]


def recomputed(
    schedule: Schedule,
    costs: Costs,
    *,
    memory_limit: Limit | None = None,
    fits: Callable[[Schedule, int], bool] | None = None,
) -> Schedule:
    """Return a schedule that recomputes no more than it must: the same actions, and less of its stages if that fits.

    Slow stages come first, each with the least share of ``costs.blocks`` with which its rank still fits.

    Example:
        >>> from sternway.schedule import make
        >>> most = replace(make("1f1b", ranks=2, microbatches=4), recompute=(0, 1))
        >>> recomputed(most, Costs(blocks=4), memory_limit=1.75).recompute
        ((0, 0.25),)

    Args:
        schedule: the schedule, with all that may be recomputed.
        costs: what decides which stages are slow.
        memory_limit: what a rank may hold, by these costs; one number, or one for each rank.
        fits: or whether a rank of a schedule fits.
    """
    if fits is None:
        limits = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * schedule.ranks

        def fits(plan: Schedule, rank: int) -> bool:
            limit = limits[rank]
            return limit is None or peak(plan, rank, costs) <= limit + EPSILON

    levels, forwards = costs.levels(schedule.num_stages), costs.per_stage(schedule.placement).F
    found = schedule.shares
    for stage in sorted(found, key=lambda stage: -forwards[stage]):
        for share in (NOTHING, *levels[stage]):
            if share >= found[stage]:
                break
            less = replace(schedule, recompute=with_share(schedule.recompute, stage, share))
            if fits(less, schedule.rank_of(stage)):
                schedule = less
                break
    return schedule
