"""The best schedule found under a memory limit: many cheap plans, the best of them mended, tiny ones solved.

Why: the named schedules are each best for one shape of costs. Real stages are uneven, W is rarely as long as F,
and memory is what is left over. The zero-bubble paper (arXiv 2401.10241, section 3) searches with an integer
program; this search needs none, and is never worse on the paper's own rows.

    policies ──▶ list schedules ──▶ the best few ──▶ moves on the critical path ──▶ branch and bound, if tiny
                      └──────────────── stop wherever the proven lower bound is met ───────────────┘

Everything is a function of the arguments: no clock, no random numbers. The same call gives the same schedule.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sternway.schedule._clock import Times, clock
from sternway.schedule._costs import Costs
from sternway.schedule._exact import branch_and_bound
from sternway.schedule._improve import improve
from sternway.schedule._list_schedule import Policy, list_schedule
from sternway.schedule._lower_bound import bound
from sternway.schedule._problem import EPSILON, Problem, Words, pose, to_schedule
from sternway.schedule._schedule import Schedule

Progress = Callable[[int, int], None]

_STEPS = 300_000
"""How many steps to lay out before being content, over all list schedules; large problems get ``_FEWEST``."""
_FEWEST, _MOST = 48, 400
_KEPT = 6
_TRIES = (100, 400)
_TINY, _NODES = 72, 20_000


def search(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_limit: float,
    stages_per_rank: int = 1,
    progress: Progress | None = None,
) -> Schedule:
    """Return the best schedule found for these costs that stays within the memory limit.

    Best is what makes the longest busy span of a rank (first start to last end) shortest; among equals, the
    makespan. ``lower_bound`` with the same arguments says how much better any schedule could be.

    Example:
        >>> from sternway.schedule import Costs
        >>> s = search(Costs(F=2.0, I=2.0, W=1.0), ranks=2, microbatches=3, memory_limit=2)
        >>> s.name
        'search'

    Args:
        costs: times and memory; uneven stages as sequences of one number for each stage.
        ranks: the number of ranks.
        microbatches: the number of microbatches in a step.
        memory_limit: what a rank may hold, in forwards of one microbatch through one rank's share.
        stages_per_rank: 1 places stage r on rank r; 2 places r and 2 * ranks - 1 - r on rank r, in a V; more
            deals them out in loops.
        progress: called with (done, total) as the search goes on.

    Returns:
        A schedule of F, I and W; deterministic.

    Raises:
        ScheduleError: counts below 1, a limit in which not even one microbatch fits, or per-stage costs for
            another number of stages.
    """
    problem = pose(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=memory_limit,
        stages_per_rank=stages_per_rank,
    )
    return to_schedule(problem, solve(problem, progress), "search" if stages_per_rank == 1 else "search-v")


def solve(problem: Problem, progress: Progress | None = None) -> Words:
    """Return the best words found for a posed problem."""
    hunt = _Hunt(problem, progress)
    return hunt.best()


@dataclass(frozen=True, slots=True)
class _Knobs:
    """A policy for any number of ranks: its caps follow from how long a microbatch stays away from a rank."""

    slope: float
    base: int
    patience: float
    forward_first: bool
    deep_first: bool = True

    def policy(self, problem: Problem) -> Policy:
        slowest = max(problem.work(rank, (0, 1)) for rank in range(problem.ranks))
        most = min(problem.microbatches, int(problem.limit / problem.keeps + EPSILON))
        caps = []
        for stages in problem.placement:
            away = problem.turnaround(min(stages), min(stages)) / slowest if slowest else 0.0
            caps.append(max(1, min(most, self.base + math.ceil(self.slope * away - EPSILON))))
        return Policy(tuple(caps), self.patience, self.forward_first, self.deep_first)


def _grid(problem: Problem) -> Iterator[_Knobs]:
    """Yield the first knobs to try, the likely ones first."""
    deep = (True,) if problem.ranks == problem.num_stages else (True, False)
    for base in (1, 2, 0):
        for slope in (1.0, 2.0, 1.5, 2.5, 1.25, 1.75, 2.25, 0.75, 0.5, 3.0):
            for patience in (0.5, 0.0, 1.0):
                for forward_first in (True, False):
                    for deep_first in deep:
                        yield _Knobs(slope, base, patience, forward_first, deep_first)


def _near(knobs: _Knobs) -> Iterator[_Knobs]:
    """Yield knobs that differ a little in one way."""
    for change in (0.125, -0.125, 0.25, -0.25):
        yield replace(knobs, slope=max(0.0, knobs.slope + change))
        yield replace(knobs, patience=max(0.0, knobs.patience + change))
    for step in (1, -1):
        yield replace(knobs, base=max(0, knobs.base + step))
    yield replace(knobs, forward_first=not knobs.forward_first)


class _Hunt:
    """One search: what was tried, and the best few plans of it."""

    __slots__ = ("found", "goal", "left", "problem", "progress", "total", "tried")

    def __init__(self, problem: Problem, progress: Progress | None) -> None:
        self.problem, self.progress = problem, progress
        self.goal = bound(problem) * (1 + EPSILON)
        self.left = self.total = max(_FEWEST, min(_MOST, _STEPS // problem.num_steps))
        self.tried: set[Policy] = set()
        self.found: list[tuple[Times, Words, _Knobs]] = []

    def best(self) -> Words:
        for knobs in _grid(self.problem):
            if self.left <= self.total // 3 or self.met():
                break
            self.lay_out(knobs)
        while self.left > 0 and not self.met():
            before = self.left
            for _, _, knobs in list(self.found[:2]):
                for near in _near(knobs):
                    self.lay_out(near)
            if self.left == before:
                break
        words = self.mend()
        self.report(self.total)
        return words

    def met(self) -> bool:
        """Whether the best plan meets the lower bound, so that none can be better."""
        return bool(self.found) and self.found[0][0].score.span <= self.goal

    def lay_out(self, knobs: _Knobs) -> None:
        """Make one list schedule, unless the same was made before or the budget is spent."""
        policy = knobs.policy(self.problem)
        if policy in self.tried or self.left <= 0:
            return
        self.tried.add(policy)
        self.left -= 1
        self.report(self.total - self.left)
        words = list_schedule(self.problem, policy)
        times = clock(self.problem, words)
        assert times is not None, "a list schedule runs to its end"
        if all(times.score != other.score for other, _, _ in self.found):
            self.found.append((times, words, knobs))
            self.found.sort(key=lambda entry: entry[0].score)
            del self.found[_KEPT:]

    def mend(self) -> Words:
        """Improve the best few plans, solve a tiny problem outright, and return the best of all."""
        tries = max(_TRIES[0], min(_TRIES[1], _STEPS // self.problem.num_steps))
        times, words, _ = self.found[0]
        if self.met():
            return words
        for start, plan, _ in self.found:
            plan, timed = improve(self.problem, plan, start, goal=self.goal, tries=tries)
            if timed.score < times.score:
                times, words = timed, plan
            if times.score.span <= self.goal:
                return words
        if self.problem.num_steps <= _TINY:
            words, _, _ = branch_and_bound(self.problem, words, times, goal=self.goal, nodes=_NODES)
        return words

    def report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, self.total)
