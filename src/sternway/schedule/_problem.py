"""What the search solves: one frozen record of numbers, and plans as words of small integers.

A plan is written as one word for each rank. Its letters are steps: ``3 * stage + kind`` with kind 0 for F,
1 for I and 2 for W. Microbatches are not written, because they are all alike: if a plan runs them in any
order at all, handing the i-th F, I and W of every stage to microbatch i keeps every time and every rule, so
the first F of a stage is always microbatch 0's, the second microbatch 1's, and so on.

    rank 0   0 0 1 2 0 1 2 1 2      F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1   3 4 3 4 3 4 5 5 5      F0 I0 F1 I1 F2 I2 W0 W1 W2
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Op
from sternway.schedule._costs import Costs, Placement
from sternway.schedule._schedule import Schedule, check_size, looped_placement, single_placement, v_placement

Words: TypeAlias = list[list[int]]

EPSILON = 1e-9
"""What two amounts of memory, or two times of a scaled problem, may differ by and still be the same."""

KINDS: tuple[Op, Op, Op] = ("F", "I", "W")


@dataclass(frozen=True, slots=True)
class Problem:
    """Costs, placement and limit, resolved to one number for each stage.

    ``duration[3 * stage + kind]`` is a step's time. ``keeps`` and ``leaves`` are what F and I of a stage
    keep: the same for every stage, as each rank holds equally many. ``hop[s]`` is the time from stage s to
    s + 1.
    """

    placement: Placement
    rank_of: tuple[int, ...]
    microbatches: int
    duration: tuple[float, ...]
    hop: tuple[float, ...]
    keeps: float
    leaves: float
    limit: float

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
        """Return the time that one microbatch needs on ``rank``, counting these kinds of step."""
        return math.fsum(self.duration[3 * stage + kind] for stage in self.placement[rank] for kind in kinds)

    def forward_lag(self, first: int, last: int) -> float:
        """Return the time from the start of F at stage ``first`` to the earliest start of F at ``last``."""
        return math.fsum(self.duration[3 * s] + self.hop[s] for s in range(first, last))

    def backward_lag(self, last: int, first: int) -> float:
        """Return the time from the end of I at stage ``last`` to the earliest end of I at ``first``."""
        return math.fsum(self.duration[3 * s + 1] + self.hop[s] for s in range(first, last))

    def turnaround(self, down: int, up: int) -> float:
        """Return the time from the end of F at stage ``down`` to the earliest start of I at stage ``up``."""
        top = self.num_stages - 1
        forward = self.forward_lag(down, top) + self.duration[3 * top] - self.duration[3 * down]
        if up == top:
            return forward
        return forward + self.duration[3 * top + 1] + self.backward_lag(top, up) - self.duration[3 * up + 1]

    def holding(self, rank: int) -> float:
        """Return what a rank holds for one microbatch, times how long, if nothing is held needlessly."""
        held = []
        for stage in self.placement[rank]:
            forward, backward, weight = self.duration[3 * stage : 3 * stage + 3]
            held.append(self.keeps * (forward + self.turnaround(stage, stage) + backward) + self.leaves * weight)
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
        )


def pose(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float,
    stages_per_rank: int = 1,
    joined: bool = False,
) -> Problem:
    """Resolve a search's arguments, or say which of them cannot be met; ``joined`` as in ``resolve``.

    Raises:
        ScheduleError: a count below 1, a limit in which not even one microbatch fits, or per-stage costs for
            another number of stages.
    """
    demand(costs, ranks, microbatches, memory_limit, stages_per_rank)
    return resolve(costs, place(ranks, stages_per_rank), microbatches, memory_limit, joined=joined)


def demand(costs: Costs, ranks: int, microbatches: int, memory_limit: float, stages_per_rank: int = 1) -> None:
    """Raise ScheduleError for numbers with which there is no schedule at all."""
    ScheduleError.unless(isinstance(costs, Costs), "costs are a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    for name, count in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("stages_per_rank", stages_per_rank),
    ):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{name} is a whole number, 1 or more", got=f"{name}={count!r}", fix="pass 1 or more")
    check_size(ranks, microbatches, stages_per_rank)
    smallest = max(1.0, costs.memory_after_I)
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float):
        raise ScheduleError(
            "memory_limit is a number of microbatches",
            got=repr(memory_limit),
            fix=f"pass {smallest:g} or more",
        )
    if not memory_limit >= smallest - EPSILON:  # written so that NaN fails too
        raise ScheduleError(
            "each rank must be able to hold one microbatch",
            got=f"memory_limit={memory_limit:g}",
            fix=f"the smallest limit that works is {smallest:g}",
        )


def resolve(
    costs: Costs, placement: Placement, microbatches: int, memory_limit: float, *, joined: bool = False
) -> Problem:
    """Resolve costs for any placement that gives each rank equally many stages.

    ``joined``: with I and W as cheap as a whole backward and still apart, which is better than can be had, and so what
    a lower bound is made of.
    """
    times = costs.per_stage(placement)
    if joined:
        times = times.joined()
    rank_of = [0] * len(times.F)
    for rank, stages in enumerate(placement):
        for stage in stages:
            rank_of[stage] = rank
    hops = zip(rank_of, [*rank_of[1:], rank_of[-1]], strict=True)
    return Problem(
        placement=placement,
        rank_of=tuple(rank_of),
        microbatches=microbatches,
        duration=tuple(time for steps in zip(times.F, times.I, times.W, strict=True) for time in steps),
        hop=tuple(costs.comm if a != b else 0.0 for a, b in hops),
        keeps=times.keeps[0],
        leaves=times.keeps_after_i[0],
        limit=min(memory_limit, microbatches * max(1.0, costs.memory_after_I)),  # more is never held
    )


def place(ranks: int, stages_per_rank: int) -> Placement:
    """Return where the search puts stages: straight for one a rank, in a V for two, in loops for more."""
    if stages_per_rank == 1:
        return single_placement(ranks)
    return v_placement(ranks) if stages_per_rank == 2 else looped_placement(ranks, stages_per_rank)


def to_schedule(problem: Problem, words: Words, name: str) -> Schedule:
    """Write words out as a schedule, numbering the microbatches."""
    counts = [0] * (3 * problem.num_stages)
    lines = []
    for word in words:
        line = []
        for step in word:
            line.append(Action(step // 3, KINDS[step % 3], counts[step]))
            counts[step] += 1
        lines.append(tuple(line))
    return Schedule(name, problem.microbatches, problem.placement, tuple(lines))
