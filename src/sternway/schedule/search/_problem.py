"""What the search solves: one frozen record of numbers, and plans as words of small integers.

A plan is written as one word for each rank. Its letters are steps, numbered as in ``_depends``: ``3 * stage + kind``
with kind 0 for F, 1 for I and 2 for W. Microbatches are not written, because they are all alike: whatever the order in
which a plan runs them, giving the i-th F, I and W of every stage to microbatch i changes no time and breaks no rule.
So the first F of a stage is always that of microbatch 0, the second that of microbatch 1, and so on.

    rank 0   0 0 1 2 0 1 2 1 2      F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1   3 4 3 4 3 4 5 5 5      F0 I0 F1 I1 F2 I2 W0 W1 W2
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from sternway.errors import ScheduleError
from sternway.schedule._again import Recompute, shares
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._depends import feeds
from sternway.schedule._schedule import check_size, looped_placement, stage_ranks, v_placement
from sternway.schedule._timeline import Timeline

Words: TypeAlias = list[list[int]]
Limit: TypeAlias = float | Sequence[float]
"""What every rank may hold, or one number for each."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Costs, placement and limit as plain numbers.

    Attributes:
        duration: the time of each step.
        hop: for each stage s, the time from the end of F of s to its arrival at s + 1.
        back: for each stage s, the time from the end of I of s + 1 to its arrival at s.
        keeps, leaves: what F and I of each stage keep.
        limit: what each rank may hold.
        feeds: for each step, (step, delay, rank) of those that can run after it: their number, the time until the
            result arrives, and the rank that runs them.
        change: by how much each step changes its rank's memory.
        cautious_change: the same, but if I leaves more than F kept, F takes that much at once, so that I always fits.
        recompute: what is recomputed.
        whole: the stages whose I is a whole backward, after which there is nothing left for W.
    """

    placement: Placement
    rank_of: tuple[int, ...]
    microbatches: int
    duration: tuple[float, ...]
    hop: tuple[float, ...]
    back: tuple[float, ...]
    keeps: tuple[float, ...]
    leaves: tuple[float, ...]
    limit: tuple[float, ...]
    recompute: Recompute = ()
    whole: tuple[int, ...] = ()
    feeds: tuple[tuple[tuple[int, float, int], ...], ...] = field(init=False, repr=False)
    change: tuple[float, ...] = field(init=False, repr=False)
    cautious_change: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = []
        for step, targets in enumerate(feeds(self.num_stages)):
            stage, hops = step // 3, []
            for target in targets:
                other = target // 3
                delay = 0.0 if other == stage else self.hop[stage] if other > stage else self.back[other]
                hops.append((target, delay, self.rank_of[other]))
            table.append(tuple(hops))
        object.__setattr__(self, "feeds", tuple(table))
        for name, amounts in (("change", self.keeps), ("cautious_change", map(max, self.keeps, self.leaves))):
            steps = [(kept, left - kept, -left) for kept, left in zip(amounts, self.leaves, strict=True)]
            object.__setattr__(self, name, tuple(change for three in steps for change in three))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        """The number of stages, over all ranks."""
        return len(self.rank_of)

    @property
    def num_steps(self) -> int:
        """The number of steps, over all ranks."""
        return 3 * self.num_stages * self.microbatches

    def work(self, rank: int, kinds: Sequence[int] = (0, 1, 2)) -> float:
        """Return the time of one microbatch on ``rank``, counting these kinds of step."""
        return math.fsum(self.duration[3 * stage + kind] for stage in self.placement[rank] for kind in kinds)

    def forward_lag(self, first: int, last: int) -> float:
        """Return the time from the start of F at stage ``first`` to the earliest start of F at ``last``."""
        return math.fsum(self.duration[3 * s] + self.hop[s] for s in range(first, last))

    def backward_lag(self, last: int, first: int) -> float:
        """Return the time from the end of I at stage ``last`` to the earliest end of I at ``first``."""
        return math.fsum(self.duration[3 * s + 1] + self.back[s] for s in range(first, last))

    def turnaround(self, down: int, up: int) -> float:
        """Return the time from the end of F at stage ``down`` to the earliest start of I at stage ``up``."""
        top = self.num_stages - 1
        forward = self.forward_lag(down, top) + self.duration[3 * top] - self.duration[3 * down]
        if up == top:
            return forward
        return forward + self.duration[3 * top + 1] + self.backward_lag(top, up) - self.duration[3 * up + 1]

    def holding(self, rank: int) -> float:
        """Return memory times time of one microbatch on a rank, if nothing is held longer than it must be."""
        held = []
        for stage in self.placement[rank]:
            forward, backward, weight = self.duration[3 * stage : 3 * stage + 3]
            whole = forward + self.turnaround(stage, stage) + backward
            held.append(self.keeps[stage] * whole + self.leaves[stage] * weight)
        return math.fsum(held)

    def scaled(self) -> "Problem":
        """Return the same problem in units of the slowest rank's work for one microbatch."""
        unit = max(self.work(rank) for rank in range(self.ranks))
        if unit == 0:
            return self
        return replace(
            self,
            duration=tuple(time / unit for time in self.duration),
            hop=tuple(time / unit for time in self.hop),
            back=tuple(time / unit for time in self.back),
        )


def pose(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: Limit,
    stages_per_rank: int = 1,
    looped: bool = False,
    joined: bool = False,
    whole: bool = True,
    recompute: Recompute = (),
) -> Problem:
    """Return the problem for a search's arguments; ``joined``, ``whole`` and ``recompute`` as in ``resolve``.

    Raises:
        ScheduleError: a count is below 1, not even one microbatch fits in the limit, or per-stage costs are for another
            number of stages.
    """
    check_arguments(costs, ranks, microbatches, memory_limit, stages_per_rank)
    placement = place(ranks, stages_per_rank, looped)
    return resolve(costs, placement, microbatches, memory_limit, joined=joined, whole=whole, recompute=recompute)


def limit_of(costs: Costs, memory_limit: Limit | None, memory: int | str | None) -> Limit:
    """Return the memory limit in microbatches, from that or from bytes.

    Raises:
        ScheduleError: not just one of the two is given, the costs do not know bytes, or no microbatch fits.
    """
    ScheduleError.unless(isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    if memory is None:
        ScheduleError.unless(
            memory_limit is not None, "a search needs a memory limit", None, "pass memory_limit=, or memory= in bytes"
        )
        return memory_limit  # type: ignore[return-value]  # just looked
    if memory_limit is not None:
        raise ScheduleError(
            "a memory limit must be given in microbatches or in bytes, not both",
            got=f"memory_limit={memory_limit!r} and memory={memory!r}",
            fix="leave one out",
        )
    return costs.limit_within(memory)


def check_arguments(costs: Costs, ranks: int, microbatches: int, memory_limit: Limit, stages_per_rank: int = 1) -> None:
    """Raise ScheduleError for arguments for which there is no schedule."""
    ScheduleError.unless(isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    counts = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{name} must be an int, 1 or more", got=f"{name}={count!r}", fix="pass 1 or more")
    check_size(ranks, microbatches, stages_per_rank)
    limits = memory_limit if isinstance(memory_limit, Sequence) else (memory_limit,) * ranks
    if len(limits) != ranks or not all(isinstance(limit, int | float) and limit is not True for limit in limits):
        raise ScheduleError(
            "memory_limit must be a number of microbatches",
            got=repr(memory_limit),
            fix=f"pass {costs.smallest():g} or more",
        )


def resolve(
    costs: Costs,
    placement: Placement,
    microbatches: int,
    memory_limit: Limit,
    *,
    joined: bool = False,
    frugal: bool = False,
    whole: bool = True,
    recompute: Recompute = (),
) -> Problem:
    """Return the problem for a placement.

    With ``joined``, I and W are split and together cost no more than a whole backward. Stages in ``recompute``, and
    with ``frugal`` all, run whole backwards if I would leave more for W than their F kept; not so without ``whole``,
    where no stage's I leaves more than that, since any may run whole backwards. No real schedule is as cheap as one
    that is joined and not whole, so this is what a lower bound is computed for.

    Raises:
        ScheduleError: not even one microbatch fits in the limit of a rank.
    """
    times = costs.per_stage(placement, recompute)
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * len(placement)
    if joined:
        times = times.joined()
    entire: tuple[int, ...] = ()
    if not whole:
        times = replace(times, keeps_after_i=tuple(map(min, times.keeps, times.keeps_after_i)))
    elif recompute or frugal:
        again = range(len(times.F)) if frugal else shares(recompute)
        entire = tuple(stage for stage in again if times.keeps_after_i[stage] > times.keeps[stage] + EPSILON)
        nothing = [0.0] * len(times.F)
        times = replace(
            times,
            I=_where(entire, times.I, times.B),
            W=_where(entire, times.W, nothing),
            keeps_after_i=_where(entire, times.keeps_after_i, nothing),
        )
        # A rank runs one backward at a time, and a forward that it holds more leaves no room for that.
        limits = [limit - max(times.works[s] for s in held) for limit, held in zip(limits, placement, strict=True)]
    for rank, held in enumerate(placement):
        smallest = math.fsum(max(times.keeps[s], times.keeps_after_i[s]) for s in held)
        if not limits[rank] >= smallest - EPSILON:  # written so that NaN fails too
            raise _too_small(memory_limit, rank, smallest + max(times.works[s] for s in held))
        limits[rank] = min(limits[rank], microbatches * smallest)  # more is never needed
    rank_of = stage_ranks(placement)
    hops = list(zip(rank_of, (*rank_of[1:], rank_of[-1]), strict=True))
    return Problem(
        placement=placement,
        rank_of=rank_of,
        microbatches=microbatches,
        duration=tuple(time for steps in zip(times.F, times.I, times.W, strict=True) for time in steps),
        hop=tuple(times.comm[a][b] for a, b in hops),
        back=tuple(times.comm[b][a] for a, b in hops),
        keeps=times.keeps,
        leaves=times.keeps_after_i,
        limit=tuple(limits),
        recompute=recompute,
        whole=entire,
    )


def _where(stages: Sequence[int], values: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """Return the values, with others for some stages."""
    return tuple(others[stage] if stage in stages else value for stage, value in enumerate(values))


def _too_small(memory_limit: Limit, rank: int, smallest: float) -> ScheduleError:
    limit = memory_limit[rank] if isinstance(memory_limit, Sequence) else memory_limit
    return ScheduleError(
        "memory_limit must be large enough for one microbatch",
        got=f"memory_limit={limit:g}" + (f" of rank {rank}" if isinstance(memory_limit, Sequence) else ""),
        fix=f"pass {smallest:g} or more",
    )


def place(ranks: int, stages_per_rank: int, looped: bool = False) -> Placement:
    """Return where the search puts stages: two per rank in a V unless ``looped``, any other number in turn."""
    in_a_v = stages_per_rank == 2 and not looped
    return v_placement(ranks) if in_a_v else looped_placement(ranks, stages_per_rank)


def within(timeline: Timeline, limit: Limit) -> bool:
    """Return whether no rank of a timeline ever holds more than its limit."""
    limits = limit if isinstance(limit, Sequence) else [limit] * len(timeline.peaks)
    return all(peak <= most + EPSILON for peak, most in zip(timeline.peaks, limits, strict=True))
