r"""A span that no schedule can beat.

Why: a search alone cannot say how much better another schedule might be. In every row of the zero-bubble paper (arXiv
2401.10241, table 5) this bound equals the span of the paper's searched schedule at a limit of p, so that schedule is
optimal.

Consider one rank, from its first start to its last end. Its first action is F of its lowest stage a, its first backward
is I of its highest stage b, its last F is one of b, and its last I is one of a:

    first F of a        first I of b                  last F of b       last I of a
    |F F F . . . . . . .|I W F I W F I W F I W F I ... F|. I W I W . . . |I W W|
     `--- [1] start ---'                                `-- [2] drain ---'

[1] Between the end of the first F and the first I, a microbatch goes up to the loss and back down. That takes at least
    ``turnaround(a, b)``. Only F can run before the first I, and only as many as fit in memory. The rest is idle.
[2] Between the end of the last F and the last I, it takes at least ``turnaround(b, a)``. Only I and W of what the rank
    holds can run, and what it holds is within the limit. The rest is idle. If the rank does not have the memory for all
    its F at once, its last F comes after its first I: the two windows do not overlap, and their idle times add up.
    Otherwise the larger one counts.
[3] Before the last F starts, W must have freed enough memory: with N forwards in all, at least
    N - 1 - (limit - 1 forward) / (what I leaves) of them have run, none of them in [1] or [2].
[4] If n forwards of a stage fit in memory, the F after them waits for the end of the first I, a turnaround later. So
    they run in rounds.
[5] Each forward is held from the start of its F to the end of its I, and what I leaves for as long as W takes. Memory
    times time, summed, is at most the limit times the span, minus what cannot be held yet at the start or any more at
    the end.
[6] Ranks depend on each other. If rank r needs a time from its first F to its last I, a rank q with a lower stage
    needs that time too, plus the way up to r and back down to q, plus one more W.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sternway.errors import ScheduleError
from sternway.schedule._again import Again, checked_recompute
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule.search._choices import are_all, choices, everything
from sternway.schedule.search._problem import Limit, Problem, check_arguments, limit_of, place, resolve


def lower_bound(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit | None = None,
    memory: int | str | None = None,
    stages_per_rank: int = 1,
    looped: bool = False,
    recompute: Collection[Again] | Literal["auto"] = (),
) -> float:
    """Return a time that ``Timeline.span`` cannot be below, for any schedule within the memory limit.

    Example:
        >>> from sternway.schedule import Costs
        >>> lower_bound(Costs(), ranks=4, microbatches=8, memory_limit=4)     # 24 of work, 3 of F + I - W
        27.0

    The proof is at the top of this module; each step of it is marked where it is computed. It holds for all schedules
    that place stages as ``search`` does, with whole or split backwards.

    Args:
        costs: times and memory; see ``Costs``.
        ranks: the number of ranks.
        microbatches: the number of microbatches in a step.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share.
        memory: or what it has in bytes, as in ``search``.
        stages_per_rank: as in ``search``.
        looped: as in ``search``.
        recompute: what is recomputed, as in ``search``; "auto" for any choice.

    Returns:
        The bound, in the unit of the costs.

    Raises:
        ScheduleError: as in ``search``.
    """
    limit = limit_of(costs, memory_limit, memory)
    check_arguments(costs, ranks, microbatches, limit, stages_per_rank)
    placement = place(ranks, stages_per_rank, looped)
    if recompute == "auto":
        return least_bound(costs, placement, microbatches, limit)
    chosen = checked_recompute(recompute, ranks * stages_per_rank)
    return bound(resolve(costs, placement, microbatches, limit, joined=True, whole=False, recompute=chosen))


def least_bound(costs: Costs, placement: Placement, microbatches: int, limit: Limit) -> float:
    """Return a time that no span can be below, whatever is recomputed.

    Raises:
        ScheduleError: not even one microbatch fits, whatever is recomputed.
    """
    posed = partial(resolve, placement=placement, microbatches=microbatches, memory_limit=limit, joined=True)
    if not are_all(placement, costs):  # as if it cost no time
        small = costs.per_stage(placement, everything(costs, sum(map(len, placement)))).keeps
        kept = [min(both) for both in zip(small, costs.per_stage(placement).keeps, strict=True)]
        rest = [min(both) for both in zip(kept, costs.per_stage(placement).keeps_after_i, strict=True)]
        return bound(posed(replace(costs, memory_after_F=kept, memory_after_I=rest)))
    found = []
    for choice in choices(placement, costs):
        try:
            found.append(bound(posed(costs, whole=False, recompute=choice)))
        except ScheduleError as error:
            problem = error
    if not found:
        raise problem
    return min(found)


def bound(problem: Problem) -> float:
    """Return the bound of a problem."""
    views = [_RankView.of(problem, rank) for rank in range(problem.ranks)]
    best = max(view.span() for view in views)
    for upper in views:
        inner = upper.inner()
        for lower in views:
            if lower.low <= upper.low:  # [6]
                way = problem.forward_lag(lower.low, upper.low) + problem.backward_lag(upper.low, lower.low)
                best = max(best, way + inner + problem.duration[3 * lower.low + 2])
    return best


@dataclass(frozen=True, slots=True)
class _RankView:
    """What the proof uses of one rank: its outer stages, extreme times, and how many forwards it can hold.

    ``keeps`` and ``leaves`` are those of the stages that take least, with which a rank can hold most.
    """

    problem: Problem
    rank: int
    low: int
    high: int
    most: tuple[float, float, float]
    least: tuple[float, float, float]
    forwards: int
    limit: float
    keeps: float
    leaves: float
    room: int

    @staticmethod
    def of(problem: Problem, rank: int) -> "_RankView":
        stages = problem.placement[rank]
        times = [[problem.duration[3 * stage + kind] for stage in stages] for kind in range(3)]
        forwards = len(stages) * problem.microbatches
        limit, keeps = problem.limit[rank], min(problem.keeps[stage] for stage in stages)
        return _RankView(
            problem=problem,
            rank=rank,
            low=min(stages),
            high=max(stages),
            most=(max(times[0]), max(times[1]), max(times[2])),
            least=(min(times[0]), min(times[1]), min(times[2])),
            forwards=forwards,
            limit=limit,
            keeps=keeps,
            leaves=min(problem.leaves[stage] for stage in stages),
            room=min(forwards, _count(limit, keeps)),
        )

    def span(self) -> float:
        """Return the time that the rank needs from its first start to its last end."""
        work = self.problem.microbatches * self.problem.work(self.rank)
        return max(work + self.idle(weights=True), self.holding(work))

    def inner(self) -> float:
        """Return the time that the rank needs from its first F to the end of its last I."""
        problem = self.problem
        work = problem.microbatches * problem.work(self.rank, (0, 1))
        return max(work + self.idle(weights=False) + self.forced() * self.least[2], self.rounds())

    def idle(self, *, weights: bool) -> float:
        """Return the idle time of [1] and [2]; without weights, [2] counts W as idle."""
        problem = self.problem
        lag = problem.turnaround(self.low, self.high) + problem.duration[3 * self.low]
        start = max(0.0, lag - self.room * self.most[0])
        drain = problem.turnaround(self.high, self.low)
        if weights:
            drain -= max(map(self.drained, range(1, self.room + 1)))
        else:
            drain -= (self.room - 1) * self.most[1]
        apart = self.room < self.forwards
        return start + max(0.0, drain) if apart else max(start, drain)

    def drained(self, full: int) -> float:
        """Return the most work in [2] if ``full`` forwards wait for their I when the last F starts."""
        half = min(self.forwards - full, _count(self.limit - full * self.keeps, self.leaves))
        return (full - 1) * self.most[1] + (full - 1 + half) * self.most[2]

    def forced(self) -> int:
        """Return the number of W of [3]."""
        if not 0 < self.leaves <= self.keeps:
            return 0
        spare = min(self.forwards, (self.limit - self.keeps) / self.leaves)  # may be more than can be counted
        return max(0, math.ceil(self.forwards - 1 - spare - EPSILON))

    def rounds(self) -> float:
        """Return the time of [4], from the first F of the lowest stage to its last I's end."""
        problem = self.problem
        forward, backward, weight = problem.duration[3 * self.low : 3 * self.low + 3]
        whole = forward + problem.turnaround(self.low, self.low) + backward
        keeps, leaves = problem.keeps[self.low], problem.leaves[self.low]
        room = min(_count(self.limit, keeps), problem.microbatches)
        rounds = -(-problem.microbatches // room) - 1
        # If the remaining memory cannot even hold what one I leaves, the next F waits for the W of that I too, or for
        # another I.
        left = _count(self.limit - room * keeps, leaves)
        extra = min(self.least[1], weight) if left == 0 else 0.0
        rest = problem.microbatches - rounds * room
        return rounds * (whole + extra) + (rest - 1) * forward + whole

    def holding(self, work: float) -> float:
        """Return the span of [5]; ``work`` is a lower bound that is already proven."""
        problem = self.problem
        held = problem.holding(self.rank)
        unit = max(max(problem.keeps[stage], problem.leaves[stage]) for stage in problem.placement[self.rank])
        limit = min(self.limit, self.forwards * unit)
        if limit <= 0:
            return 0.0
        missing = _missing(limit, unit)
        start, end = self.least[0] * missing, self.least[2] * missing
        apart = _count(limit, unit) * (self.least[0] + self.least[2]) <= work
        spare = start + end if apart else max(start, end)
        return (problem.microbatches * held + spare) / limit


def _count(amount: float, unit: float) -> int:
    """Return how many units fit into an amount; a very large number if the unit is 0."""
    if amount >= unit * 1e9:
        return 10**9
    return int(amount / unit + EPSILON) if unit > 0 else 10**9


def _missing(limit: float, unit: float) -> float:
    """Return how far a ramp of one unit per step is below the limit, summed until it reaches it."""
    steps = _count(limit, unit)
    return steps * limit - unit * steps * (steps + 1) / 2
