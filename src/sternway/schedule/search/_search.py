"""The best schedule found under a memory limit, for these costs.

Why: each named schedule is best for one kind of costs. Real stages are unequal, W rarely takes as long as F, and memory
is limited. The zero-bubble paper (arXiv 2401.10241, section 3) searches with an integer program. This search needs
none, and is never worse on the paper's own rows.

``_hunt`` plans I and W apart. Where a whole backward costs less than I + W, as one with ``overhead`` does, or I leaves
more than F kept, candidates are the plan found for these costs, the plan found with I and W as cheap as a whole
backward, the plan found with whole backwards where I leaves more, and the named schedules. Each has its I and W joined
where that helps (``fuse``), and the best is returned.

Which stages are recomputed is chosen in ``_recompute``: there is one such search for each choice that its lower bound
does not rule out.
"""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from sternway.errors import ScheduleError
from sternway.schedule._again import Again, Recompute, checked_recompute, shares
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._offload import offloaded
from sternway.schedule._schedule import Schedule, checked_stages
from sternway.schedule._simulate import simulate
from sternway.schedule.named._make import names
from sternway.schedule.search._choices import everything
from sternway.schedule.search._fuse import fuse, length
from sternway.schedule.search._gathered import best_gathered, rest_of, too_small
from sternway.schedule.search._hunt import Progress, named, part_of, solve
from sternway.schedule.search._problem import Limit, Problem, check_arguments, limit_of, place, resolve, within
from sternway.schedule.search._recompute import best_choice, recomputed
from sternway.schedule.search._words import to_schedule


def search(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit | None = None,
    memory: int | str | None = None,
    stages_per_rank: int = 1,
    looped: bool = False,
    recompute: Collection[Again] | Literal["auto"] = (),
    offload: bool = False,
    sharded: Collection[int] | bool = False,
    gathered: int | None = None,
    progress: Progress | None = None,
) -> Schedule:
    """Return the best schedule found for these costs that stays within the memory limit.

    The best schedule has the shortest ``Timeline.span``, the longest time of a rank from its first start to its last
    end; among equals, the shortest makespan. ``lower_bound`` with the same arguments says how much better any schedule
    could be. Of sharded stages it has the shortest ``Timeline.period``.

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
        looped: whether two stages are placed like more: r and r + ranks. That can be faster where W is short or most is
            recomputed; elsewhere a V is as fast, or faster.
        recompute: the stages that keep their inputs alone and run their forward again, or shares of them, as in
            ``Schedule``; or "auto" to choose them, too: the fastest choice within the limit. ``costs.memory_input`` and
            ``costs.memory_again`` say what that needs, and ``costs.blocks`` of how many parts some may be chosen.
        offload: whether microbatches may be moved to the host and back (``offloaded``), for ``costs.offload`` each; the
            shortest plan with or without it is returned. ``lower_bound`` does not hold for such plans.
        sharded: the stages whose parameters are sharded, or True for all. Plans are compared with their upkeep in place
            (``schedule.sharded``), by ``costs.gather`` and ``costs.reduce``, and what is gathered counts as memory.
        gathered: how many of its sharded stages a rank keeps gathered at once; by default as many as fit, which may not
            be the same on all ranks.
        progress: called with (done, total) during the search.

    Returns:
        A schedule of F, I and W, with B instead of I and W where ``costs.B`` makes that better, or I would leave more
        than F kept, always so in stages that are recomputed; UNSHARD, REDUCE_GRAD and RESHARD where stages are sharded.

    Raises:
        ScheduleError: a count is below 1, not even one microbatch fits in the limit, per-stage costs are for another
            number of stages, or stages are both sharded and offloaded.
    """
    limit = limit_of(costs, memory_limit, memory)
    check_arguments(costs, ranks, microbatches, limit, stages_per_rank)
    placement = place(ranks, stages_per_rank, looped)
    held = checked_shards(sharded, gathered, ranks * stages_per_rank)
    found = partial(_found, costs, placement, microbatches, recompute=recompute, offload=offload)
    if not held:
        return found(limit, progress)
    if offload:
        raise ScheduleError(
            "a search cannot both shard and offload stages", got="sharded= and offload=True", fix="leave one out"
        )
    rests = rest_of(costs, placement, limit, held, gathered)
    plans = [
        plan
        for same in _uniform(recompute, placement, costs)
        for plan in _named_within(costs, placement, microbatches, math.inf, same)
    ]
    for number, rest in enumerate(rests):
        with suppress(ScheduleError):  # not even one microbatch beside what is gathered
            plans.insert(number, found(rest, part_of(progress, number, len(rests))))
    best = best_gathered(plans, costs, held, gathered, limit)
    if best is None:
        raise too_small(costs, placement, limit, held, gathered, recompute == "auto")
    return best


def _found(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    limit: Limit,
    progress: Progress | None,
    *,
    recompute: Collection[Again] | Literal["auto"],
    offload: bool,
) -> Schedule:
    """Return the best schedule of stages that are not sharded."""
    find = partial(_plan, costs, placement=placement, microbatches=microbatches, limit=limit)
    uniform = _uniform(recompute, placement, costs)
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
                alike = _named_within(costs, placement, microbatches, limit, same)
                plans += [recomputed(plan, costs, memory_limit=limit) for plan in alike]
        else:
            plans.append(find(uniform[0], progress))
    except ScheduleError:  # not even one microbatch stays
        if not plans:
            raise
    return plans[0] if len(plans) == 1 else _best(plans, costs)


def _uniform(recompute: Collection[Again] | Literal["auto"], placement: Placement, costs: Costs) -> list[Recompute]:
    """Return what is recomputed in named schedules."""
    count = sum(map(len, placement))
    return [(), everything(costs, count)] if recompute == "auto" else [checked_recompute(recompute, count)]


def checked_shards(sharded: Collection[int] | bool, gathered: int | None, count: int) -> tuple[int, ...]:
    """Return the sharded ones of so many stages, or raise ScheduleError."""
    if sharded is False and gathered is not None:
        raise ScheduleError("gathered is for sharded stages", got=f"gathered={gathered!r}", fix="pass sharded=True")
    ScheduleError.unless(
        gathered is None or (type(gathered) is int and gathered >= 1),
        "gathered must be a number of stages from 1 on",
        gathered,
        "pass 1 or more, or leave it out",
    )
    return checked_stages("sharded", range(count) if sharded is True else () if sharded is False else sharded, count)


def _plan(
    costs: Costs,
    recompute: Recompute,
    progress: Progress | None,
    *,
    placement: Placement,
    microbatches: int,
    limit: Limit,
) -> Schedule:
    """Return the best schedule found if these stages are recomputed."""
    times, per_rank = costs.per_stage(placement, recompute), len(placement[0])
    name = "search" if per_rank == 1 else "search-v" if placement == place(len(placement), 2) else "search-looped"
    ways: list[dict[str, bool]] = [{}]
    if costs.B is not None or costs.overhead:  # one action has less overhead than two
        ways.append({"joined": True})
    leaves_more = (left > kept + EPSILON for left, kept in zip(times.keeps_after_i, times.keeps, strict=True))
    if any(more and stage not in shares(recompute) for stage, more in enumerate(leaves_more)):
        ways.append({"frugal": True})
    problems, refusal = list[Problem](), None
    for way in ways:
        try:
            problems.append(resolve(costs, placement, microbatches, limit, recompute=recompute, **way))
        except ScheduleError as error:  # not even one microbatch, this way
            refusal = error
    if refusal is not None and not problems:
        raise refusal
    unlike = recompute or len(ways) > 1 or costs.comm_busy  # a problem's clock knows no messages that wait for others
    plans = _named_within(costs, placement, microbatches, limit, recompute) if unlike else []
    for number, problem in enumerate(problems):
        plans.append(to_schedule(problem, solve(problem, part_of(progress, number, len(problems))), name))
    return _best(plans, costs) if len(plans) > 1 else plans[0]


def _named_within(
    costs: Costs, placement: Placement, microbatches: int, limit: Limit, recompute: Recompute
) -> list[Schedule]:
    """Return the named schedules that place their stages so, and stay within the limit if these are recomputed."""
    made = named(placement, microbatches, names(), len(placement[0]))
    plans = (replace(plan, recompute=recompute) for plan in made)
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
