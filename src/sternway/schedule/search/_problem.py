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
from sternway.schedule._action import OPS, Action
from sternway.schedule._costs import EPSILON, Costs, Placement
from sternway.schedule._depends import KIND, feeds
from sternway.schedule._schedule import Schedule, check_size, looped_placement, stage_ranks, v_placement

Words: TypeAlias = list[list[int]]


@dataclass(frozen=True, slots=True)
class Problem:
    """Costs, placement and limit as plain numbers.

    Attributes:
        duration: the time of each step.
        hop: for each stage s, the time from the end of an action of s to its arrival at s + 1, or the other way.
        keeps, leaves: what F and I of a stage keep: the same for every stage, since all ranks hold equally many.
        feeds: for each step, (step, delay, rank) of those that can run after it: their number, the time until the
            result arrives, and the rank that runs them.
        change: by how much F, I and W change a rank's memory.
        cautious_change: the same, but if I leaves more than F kept, F takes that much at once, so that I always fits.
    """

    placement: Placement
    rank_of: tuple[int, ...]
    microbatches: int
    duration: tuple[float, ...]
    hop: tuple[float, ...]
    keeps: float
    leaves: float
    limit: float
    feeds: tuple[tuple[tuple[int, float, int], ...], ...] = field(init=False, repr=False)
    change: tuple[float, float, float] = field(init=False, repr=False)
    cautious_change: tuple[float, float, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = []
        for step, targets in enumerate(feeds(self.num_stages)):
            stage, hops = step // 3, []
            for target in targets:
                other = target // 3
                delay = 0.0 if other == stage else self.hop[min(stage, other)]
                hops.append((target, delay, self.rank_of[other]))
            table.append(tuple(hops))
        object.__setattr__(self, "feeds", tuple(table))
        for name, keeps in (("change", self.keeps), ("cautious_change", max(self.keeps, self.leaves))):
            object.__setattr__(self, name, (keeps, self.leaves - keeps, -self.leaves))

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
        return math.fsum(self.duration[3 * s + 1] + self.hop[s] for s in range(first, last))

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
    """Return the problem for a search's arguments; ``joined`` as in ``resolve``.

    Raises:
        ScheduleError: a count is below 1, not even one microbatch fits in the limit, or per-stage costs are for another
            number of stages.
    """
    check_arguments(costs, ranks, microbatches, memory_limit, stages_per_rank)
    return resolve(costs, place(ranks, stages_per_rank), microbatches, memory_limit, joined=joined)


def limit_of(costs: Costs, memory_limit: float | None, memory: int | str | None) -> float:
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


def check_arguments(costs: Costs, ranks: int, microbatches: int, memory_limit: float, stages_per_rank: int = 1) -> None:
    """Raise ScheduleError for arguments for which there is no schedule."""
    ScheduleError.unless(isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    counts = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ScheduleError(f"{name} must be an int, 1 or more", got=f"{name}={count!r}", fix="pass 1 or more")
    check_size(ranks, microbatches, stages_per_rank)
    smallest = max(1.0, costs.memory_after_I)
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float):
        raise ScheduleError(
            "memory_limit must be a number of microbatches",
            got=repr(memory_limit),
            fix=f"pass {smallest:g} or more",
        )
    if not memory_limit >= smallest - EPSILON:  # written so that NaN fails too
        raise ScheduleError(
            "memory_limit must be large enough for one microbatch",
            got=f"memory_limit={memory_limit:g}",
            fix=f"pass {smallest:g} or more",
        )


def resolve(
    costs: Costs, placement: Placement, microbatches: int, memory_limit: float, *, joined: bool = False
) -> Problem:
    """Return the problem for any placement in which all ranks hold equally many stages.

    With ``joined``, I and W are split and together cost no more than a whole backward. No real schedule is as cheap, so
    this is what a lower bound is computed for.
    """
    times = costs.per_stage(placement)
    if joined:
        times = times.joined()
    rank_of = stage_ranks(placement)
    hops = zip(rank_of, (*rank_of[1:], rank_of[-1]), strict=True)
    return Problem(
        placement=placement,
        rank_of=rank_of,
        microbatches=microbatches,
        duration=tuple(time for steps in zip(times.F, times.I, times.W, strict=True) for time in steps),
        hop=tuple(costs.comm if a != b else 0.0 for a, b in hops),
        keeps=times.keeps[0],
        leaves=times.keeps_after_i[0],
        limit=min(memory_limit, microbatches * max(1.0, costs.memory_after_I)),  # more is never needed
    )


def place(ranks: int, stages_per_rank: int) -> Placement:
    """Return where the search puts stages: in a V for two per rank, in turn for any other number."""
    return v_placement(ranks) if stages_per_rank == 2 else looped_placement(ranks, stages_per_rank)


def to_schedule(problem: Problem, words: Words, name: str) -> Schedule:
    """Return words as a schedule, with numbered microbatches."""
    counts = [0] * (3 * problem.num_stages)
    lines = []
    for word in words:
        line = []
        for step in word:
            line.append(Action(step // 3, OPS[step % 3], counts[step]))
            counts[step] += 1
        lines.append(tuple(line))
    return Schedule(name, problem.microbatches, problem.placement, tuple(lines))


def to_words(schedule: Schedule) -> Words:
    """Return a schedule's order as words, with each B as I and W, and each overlapped pair as its two actions.

    Every action then ends no later than it did, and memory is the same.
    """
    words = []
    for steps in schedule.actions:
        word: list[int] = []
        for action in (action for step in steps for action in step.actions):
            step = 3 * action.stage + KIND[action.op]
            word += (step, step + 1) if action.op == "B" else (step,)
        words.append(word)
    return words


def peak_memory(problem: Problem, words: Words) -> float:
    """Return the most that any rank holds at once."""
    peak, change = 0.0, problem.change
    for word in words:
        held = 0.0
        for step in word:
            held += change[step % 3]
            if held > peak:
                peak = held
    return peak
