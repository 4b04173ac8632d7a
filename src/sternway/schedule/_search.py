"""The best schedule found under a memory limit: many cheap plans, the best of them mended, tiny ones solved.

Why: the named schedules are each best for one shape of costs. Real stages are uneven, W is rarely as long
as F, and memory is what is left over. The zero-bubble paper (arXiv 2401.10241, section 3) searches with an
integer program; this search needs none, and is never worse on the paper's own rows.

    policies ──▶ list schedules ─┐
    periods ───▶ patterns ───────┼─▶ the best of each ──▶ moves on the critical path ──▶ if tiny, branch and
    names ─────▶ named schedules ┘                                                              bound
                 └───────────────── stop wherever the proven lower bound is met ────────────────────┘

All this plans I and W apart. Where a whole backward costs less, plans made so, plans made as if every W cost what it
does in a whole backward, and named schedules have their I and W joined where that helps (``fuse``); the best is taken.

Everything is a function of the arguments: budgets count steps, not seconds, and draws have a fixed seed.
The same call gives the same schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sternway.errors import ScheduleError
from sternway.schedule._clock import Times, clock, peak_memory
from sternway.schedule._costs import Costs
from sternway.schedule._exact import branch_and_bound
from sternway.schedule._fuse import fuse, length
from sternway.schedule._improve import improve
from sternway.schedule._knobs import Knobs, grid, near
from sternway.schedule._list_schedule import Policy, list_schedule
from sternway.schedule._lower_bound import bound
from sternway.schedule._make import make, names
from sternway.schedule._named_words import named_words
from sternway.schedule._pattern import patterns, repeat
from sternway.schedule._problem import EPSILON, Problem, Words, pose, to_schedule
from sternway.schedule._refill import refill
from sternway.schedule._schedule import Schedule
from sternway.schedule._simulate import simulate

Progress = Callable[[int, int], None]

# Budgets, in steps laid out or timed, and what that is at least and at most in plans: they keep 64 ranks and
# 512 microbatches within a minute.
_LISTS, _FEWEST_LISTS, _MOST_LISTS = 100_000, 40, 300
_MOVES, _FEWEST_MOVES, _MOST_MOVES = 600_000, 60, 2_000
_PATTERNS = 8
_PATIENCES = (0.5, 1.0)
_KEPT = 3
_THOROUGH = 2_000
"""Problems up to this many steps go on when the bound is met, for a shorter makespan."""
_TINY, _NODES = 100, 20_000
"""Problems up to this many steps are then solved by branch and bound, over so many partial plans."""


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
    makespan. With ``costs.B`` it is the other way round. ``lower_bound`` with the same arguments says how much better
    any schedule could be.

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
        A schedule of F, I and W, and of B where ``costs.B`` makes it worth while; deterministic.

    Raises:
        ScheduleError: counts below 1, a limit in which not even one microbatch fits, or per-stage costs for
            another number of stages.
    """
    posed = partial(
        pose,
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=memory_limit,
        stages_per_rank=stages_per_rank,
    )
    problem = posed()
    name = {1: "search", 2: "search-v"}.get(stages_per_rank, "search-looped")
    if costs.B is None:
        return to_schedule(problem, solve(problem, progress), name)
    plans = _named(costs, problem)
    for half, each in enumerate((problem, posed(joined=True))):
        plans.append(to_schedule(each, solve(each, half_of(progress, half)), name))
    return min((fuse(plan, costs) for plan in plans), key=lambda plan: length(plan, costs))


def half_of(progress: Progress | None, half: int) -> Progress | None:
    """Return a progress, in thousandths, for one of two searches that are each half of the whole."""
    if progress is None:
        return None
    return lambda done, total: progress(1000 * half + 1000 * done // total, 2000)


def _named(costs: Costs, problem: Problem) -> list[Schedule]:
    """The named schedules that place stages as the problem does and fit in its memory."""
    found = []
    for name in names():
        try:
            made = make(name, ranks=problem.ranks, microbatches=problem.microbatches)
        except ScheduleError:
            continue  # not for these numbers
        if made.placement == problem.placement and simulate(made, costs).peak_memory <= problem.limit + EPSILON:
            found.append(made)
    return found


def solve(problem: Problem, progress: Progress | None = None) -> Words:
    """Return the best words found for a posed problem."""
    return _Hunt(problem.scaled(), progress).run()  # words have no unit, and rounding then has one size


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan, and the knobs that made it, if knobs did."""

    times: Times
    words: Words
    knobs: Knobs | None = None


class _Hunt:
    """One search: what was tried, and the best few plans of each family."""

    __slots__ = ("families", "goal", "lists", "moves", "problem", "progress", "spent", "thorough", "tried")

    def __init__(self, problem: Problem, progress: Progress | None) -> None:
        self.problem, self.progress = problem, progress
        self.goal = bound(problem) * (1 + EPSILON)
        steps = problem.num_steps
        self.lists = max(_FEWEST_LISTS, min(_MOST_LISTS, _LISTS // steps))
        self.moves = max(_FEWEST_MOVES, min(_MOST_MOVES, _MOVES // steps))
        self.tried: set[Policy] = set()
        self.families: dict[str, list[_Found]] = {"named": [], "list": [], "pattern": []}
        self.thorough = steps <= _THOROUGH
        self.spent = 0

    def run(self) -> Words:
        self.try_lists()
        if self.thorough or not self.met():
            for words in named_words(self.problem):
                self.add_refilled("named", words)
        if not self.met():
            for pattern in patterns(self.problem, _PATTERNS):
                self.add_refilled("pattern", repeat(self.problem, pattern))
        best = self.best() if self.met() else self.mend()
        if best.times.score.span > self.goal and self.problem.num_steps <= _TINY:
            found = branch_and_bound(self.problem, best.words, best.times, goal=self.goal, nodes=_NODES)
            best = _Found(found.times, found.words)
        self.report(self.lists + self.moves - self.spent)
        return best.words

    def best(self) -> _Found:
        """Return the best plan so far."""
        return min((family[0] for family in self.families.values() if family), key=lambda f: f.times.score)

    def met(self) -> bool:
        """Return whether the best plan meets the lower bound, so that none can be better."""
        return any(family and family[0].times.score.span <= self.goal for family in self.families.values())

    def add(self, family: str, words: Words, knobs: Knobs | None = None) -> None:
        """Keep a plan if it fits in memory and is among the best of its family."""
        if peak_memory(self.problem, words) > self.problem.limit + EPSILON:
            return
        times = clock(self.problem, words)
        kept = self.families[family]
        if times is not None and all(times.score != other.times.score for other in kept):
            kept.append(_Found(times, words, knobs))
            kept.sort(key=lambda found: found.times.score)
            del kept[_KEPT:]

    def add_refilled(self, family: str, words: Words) -> None:
        """Add a plan as it is and with its W placed anew."""
        self.add(family, words)
        for patience in _PATIENCES:
            refilled = refill(self.problem, words, patience)
            if refilled is not None:
                self.add(family, refilled)

    def try_lists(self) -> None:
        """Make list schedules: over the grid for half of the budget, then around the best."""
        for knobs in grid(self.problem):
            if len(self.tried) * 2 >= self.lists or (self.met() and not self.thorough):
                break
            self.try_list(knobs)
        before = -1
        while before < len(self.tried) < self.lists and not self.met():
            before = len(self.tried)
            for found in self.families["list"][:2]:
                if found.knobs is not None:
                    for knobs in near(found.knobs):
                        self.try_list(knobs)
        self.report(self.lists - self.spent)

    def try_list(self, knobs: Knobs) -> None:
        """Make one list schedule, unless the same was made before or the budget is spent."""
        policy = knobs.policy(self.problem)
        if policy not in self.tried and len(self.tried) < self.lists:
            self.tried.add(policy)
            self.add("list", list_schedule(self.problem, policy), knobs)
            self.report(1)

    def mend(self) -> _Found:
        """Improve the best plans of each family a little, and the best of those with all that is left."""
        starts = [found for family in self.families.values() for found in family[:2]]
        share = self.moves // (2 * len(starts))
        mended = [self.improved(found, share) for found in starts]
        best = min(mended, key=lambda found: found.times.score)
        return self.improved(best, self.moves - share * len(starts))

    def improved(self, found: _Found, tries: int) -> _Found:
        words, times = improve(self.problem, found.words, found.times, goal=self.goal, tries=tries)
        self.report(tries)
        return _Found(times, words)

    def report(self, more: int) -> None:
        """Count what is done, and tell."""
        self.spent += more
        if self.progress is not None:
            self.progress(self.spent, self.lists + self.moves)
