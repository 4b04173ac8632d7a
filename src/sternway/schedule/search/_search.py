"""The best schedule found under a memory limit, for these costs.

Why: each named schedule is best for one kind of costs. Real stages are unequal, W rarely takes as long as F, and memory
is limited. The zero-bubble paper (arXiv 2401.10241, section 3) searches with an integer program. This search needs
none, and is never worse on the paper's own rows.

``_hunt`` plans I and W apart. Where a whole backward costs less than I + W, candidates are the plan found for these
costs, the plan found with I and W as cheap as a whole backward, and the named schedules. Each has its I and W joined
where that helps (``fuse``), and the best is returned.

Which stages are recomputed is chosen in ``_recompute``: there is one such search for each choice that its lower bound
does not rule out.
"""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Literal

from sternway.errors import ScheduleError
from sternway.schedule._costs import Costs, Placement
from sternway.schedule._offload import offloaded
from sternway.schedule._schedule import Schedule, checked_stages
from sternway.schedule._simulate import simulate
from sternway.schedule.named._make import names
from sternway.schedule.search._fuse import fuse, length
from sternway.schedule.search._hunt import Progress, half_of, named, solve
from sternway.schedule.search._problem import Limit, check_arguments, limit_of, place, pose, within
from sternway.schedule.search._recompute import best_choice
from sternway.schedule.search._words import to_schedule


def search(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit | None = None,
    memory: int | str | None = None,
    stages_per_rank: int = 1,
    recompute: Collection[int] | Literal["auto"] = (),
    offload: bool = False,
    progress: Progress | None = None,
) -> Schedule:
    """Return the best schedule found for these costs that stays within the memory limit.

    The best schedule has the shortest ``Timeline.span``, the longest time of a rank from its first start to its last
    end; among equals, the shortest makespan. ``lower_bound`` with the same arguments says how much better any schedule
    could be.

    Example:
        >>> from sternway.schedule import Costs
        >>> s = search(Costs(F=2.0, I=2.0, W=1.0), ranks=2, microbatches=3, memory_limit=2)
        >>> s.name
        'search'

    Args:
        costs: times and memory; for unequal stages, sequences with one number for each stage.
        ranks: the number of ranks.
        microbatches: the number of microbatches in a step.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share; one number, or one
            for each rank.
        memory: or what it has in bytes, or as text such as "20GB"; the costs must have ``activation_bytes``.
        stages_per_rank: with 1, rank r holds stage r; with 2, stages r and 2 * ranks - 1 - r, in a V; with more, stages
            r, r + ranks, r + 2 ranks, ...
        recompute: the stages that keep their inputs alone and run their forward again; or "auto" to choose them, too:
            the fastest choice within the limit. ``costs.memory_input`` and ``costs.memory_again`` say what that needs.
        offload: whether microbatches may be moved to the host and back (``offloaded``), for ``costs.offload`` each; the
            shortest plan with or without it is returned. ``lower_bound`` does not hold for such plans.
        progress: called with (done, total) during the search.

    Returns:
        A schedule of F, I and W, with B instead of I and W where ``costs.B`` makes that better, and in stages that are
        recomputed.

    Raises:
        ScheduleError: a count is below 1, not even one microbatch fits in the limit, or per-stage costs are for another
            number of stages.
    """
    limit = limit_of(costs, memory_limit, memory)
    check_arguments(costs, ranks, microbatches, limit, stages_per_rank)
    find = partial(_plan, costs, ranks=ranks, microbatches=microbatches, limit=limit, stages_per_rank=stages_per_rank)
    placement = place(ranks, stages_per_rank)
    everything = tuple(range(ranks * stages_per_rank))
    uniform = [(), everything] if recompute == "auto" else [checked_stages("recompute", recompute, len(everything))]
    plans: list[Schedule] = []
    if offload:
        for same in uniform:
            ample = find(same, None, limit=math.inf)
            for plan in (ample, *_named_within(costs, placement, microbatches, math.inf, same)):
                plans += moved_within(plan, costs, limit)
    try:
        if recompute == "auto":
            plans.append(best_choice(costs, placement, microbatches, limit, find, progress))
            for same in uniform:
                plans += _named_within(costs, placement, microbatches, limit, same)
        else:
            plans.append(find(uniform[0], progress))
    except ScheduleError:  # not even one microbatch stays
        if not plans:
            raise
    return plans[0] if len(plans) == 1 else _best(plans, costs)


def _plan(
    costs: Costs,
    recompute: tuple[int, ...],
    progress: Progress | None,
    *,
    ranks: int,
    microbatches: int,
    limit: Limit,
    stages_per_rank: int,
) -> Schedule:
    """Return the best schedule found if these stages are recomputed."""
    posed = partial(
        pose,
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=limit,
        stages_per_rank=stages_per_rank,
        recompute=recompute,
    )
    problem = posed()
    name = {1: "search", 2: "search-v"}.get(stages_per_rank, "search-looped")
    if costs.B is None and not recompute:
        return to_schedule(problem, solve(problem, progress), name)
    plans = _named_within(costs, problem.placement, microbatches, limit, recompute)
    plans.append(to_schedule(problem, solve(problem, half_of(progress, 0)), name))
    if costs.B is not None:
        each = posed(joined=True)
        plans.append(to_schedule(each, solve(each, half_of(progress, 1)), name))
    return _best(plans, costs)


def _named_within(
    costs: Costs, placement: Placement, microbatches: int, limit: Limit, recompute: tuple[int, ...]
) -> list[Schedule]:
    """Return the named schedules that place their stages so, and stay within the limit if these are recomputed."""
    plans = (replace(plan, recompute=recompute) for plan in named(placement, microbatches, names()))
    return [plan for plan in plans if within(simulate(plan, costs), limit)]


def moved_within(plan: Schedule, costs: Costs, limit: Limit) -> list[Schedule]:
    """Return the plan with microbatches moved so that it is within the limit, if it can be."""
    try:
        made = offloaded(fuse(plan, costs), costs, memory_limit=limit)
    except ScheduleError:
        return []
    return [replace(made, name=f"{made.name}-offloaded")]


def _best(plans: list[Schedule], costs: Costs) -> Schedule:
    """Return the shortest, with I and W joined where that helps; among equals, the first."""
    return min((fuse(plan, costs) for plan in plans), key=lambda plan: length(plan, costs))
