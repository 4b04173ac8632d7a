"""Solve one problem: many cheap plans, the best of them improved, small ones solved exactly.

    priorities ──▶ list schedules ──┐
    periods ─────▶ patterns ────────┼─▶ the best of each ──▶ moves on the critical path ──▶ if small, branch
    names ───────▶ named schedules ─┘                                                          and bound
                   └─────────────── stop wherever the proven lower bound is met ──────────────────┘

The result depends on the problem only: budgets count steps, not seconds, and the random seed is fixed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sternway.errors import ScheduleError
from sternway.schedule._costs import EPSILON, Placement
from sternway.schedule._schedule import Schedule
from sternway.schedule.named._make import make
from sternway.schedule.search._clock import Times, clock
from sternway.schedule.search._exact import branch_and_bound
from sternway.schedule.search._improve import improve
from sternway.schedule.search._knobs import Knobs, grid, near
from sternway.schedule.search._list_schedule import Priorities, list_schedule, refill
from sternway.schedule.search._lower_bound import bound
from sternway.schedule.search._pattern import patterns, repeat
from sternway.schedule.search._problem import Problem, Words
from sternway.schedule.search._words import fits, to_words

Progress = Callable[[int, int], None]

# Budgets in steps, and the smallest and largest number of plans for them. With these, 64 ranks and 512 microbatches
# take less than a minute.
_LISTS, _FEWEST_LISTS, _MOST_LISTS = 100_000, 40, 300
_MOVES, _FEWEST_MOVES, _MOST_MOVES = 600_000, 60, 2_000
_PATTERNS = 8
_PATIENCES = (0.5, 1.0)
_KEPT = 3
_LOOPED = ("interleaved-1f1b", "interleaved-zb", "looped-bfs")
_STARTS = {1: ("1f1b", "zb-h1", "zb-h2", "gpipe"), 2: ("zb-v", "v-half", "v-min", "dualpipe-v", *_LOOPED)}
_THOROUGH = 2_000
"""Problems of up to this many steps continue when the bound is met, for a shorter makespan."""
_SMALL, _NODES = 100, 20_000
"""Problems of up to this many steps are solved by branch and bound, over at most this many partial plans."""


def part_of(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Return a progress function for one of several searches, each of which is an equal part of the whole."""
    if progress is None:
        return None
    return lambda done, total: progress(1000 * number + 1000 * done // total, 1000 * count)


def named(
    placement: Placement, microbatches: int, wanted: Iterable[str], stages_per_rank: int | None = None
) -> Iterator[Schedule]:
    """Yield the named schedules that place their stages so."""
    for name in wanted:
        try:
            made = make(name, ranks=len(placement), microbatches=microbatches, stages_per_rank=stages_per_rank)
        except ScheduleError:  # it does not exist for these numbers
            continue
        if made.placement == placement:
            yield made


def named_words(problem: Problem) -> Iterator[Words]:
    """Yield the named schedules as words to start from, so that no search is worse than one of them."""
    stages_per_rank = problem.num_stages // problem.ranks
    starts = _STARTS.get(stages_per_rank, _LOOPED)
    for made in named(problem.placement, problem.microbatches, starts, stages_per_rank):
        yield to_words(made)


def solve(problem: Problem, progress: Progress | None = None) -> Words:
    """Return the best words found for a problem."""
    return _Hunt(problem.scaled(), progress).run()  # scaled, so that EPSILON means the same for any unit of time


def glance(problem: Problem) -> float:
    """Return the span of a plan that is found at once, to compare problems by: as good as ``solve`` only by luck."""
    hunt = _Hunt(problem.scaled(), None)
    hunt.lists = _FEWEST_LISTS
    hunt.gather(repeating=False)
    times = clock(problem, hunt.best().words)
    assert times is not None, "a plan that was found runs to its end"
    return times.score.span


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan, and the knobs that it was made with, if any."""

    times: Times
    words: Words
    knobs: Knobs | None = None


class _Hunt:
    """One search: what has been tried, and the best few plans of each family."""

    __slots__ = ("families", "goal", "lists", "moves", "problem", "progress", "spent", "thorough", "tried")

    def __init__(self, problem: Problem, progress: Progress | None) -> None:
        self.problem, self.progress = problem, progress
        self.goal = bound(problem) * (1 + EPSILON)
        steps = problem.num_steps
        self.lists = max(_FEWEST_LISTS, min(_MOST_LISTS, _LISTS // steps))
        self.moves = max(_FEWEST_MOVES, min(_MOST_MOVES, _MOVES // steps))
        self.tried: set[Priorities] = set()
        self.families: dict[str, list[_Found]] = {"named": [], "list": [], "pattern": []}
        self.thorough = steps <= _THOROUGH
        self.spent = 0

    def gather(self, *, repeating: bool = True) -> None:
        """Make plans of each family; patterns take longest."""
        self.try_lists()
        if self.thorough or not self.met():
            for words in named_words(self.problem):
                self.add_refilled("named", words)
        if repeating and not self.met():
            for pattern in patterns(self.problem, _PATTERNS):
                self.add_refilled("pattern", repeat(self.problem, pattern))

    def run(self) -> Words:
        self.gather()
        best = self.best() if self.met() else self.improve_best()
        if best.times.score.span > self.goal and self.problem.num_steps <= _SMALL:
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
        if not fits(self.problem, words):
            return
        times = clock(self.problem, words)
        kept = self.families[family]
        if times is not None and all(times.score != other.times.score for other in kept):
            kept.append(_Found(times, words, knobs))
            kept.sort(key=lambda found: found.times.score)
            del kept[_KEPT:]

    def add_refilled(self, family: str, words: Words) -> None:
        """Add a plan, and the same plan with its W placed anew."""
        self.add(family, words)
        for patience in _PATIENCES:
            refilled = refill(self.problem, words, patience)
            if refilled is not None:
                self.add(family, refilled)

    def try_lists(self) -> None:
        """Make list schedules: from the grid for half of the budget, then with knobs near the best."""
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
        """Make one list schedule, unless the same was made before or the budget is used up."""
        priorities = knobs.priorities(self.problem)
        if priorities not in self.tried and len(self.tried) < self.lists:
            self.tried.add(priorities)
            self.add("list", list_schedule(self.problem, priorities), knobs)
            self.report(1)

    def improve_best(self) -> _Found:
        """Improve the best plans of each family a little, and the best of those with the rest of the budget."""
        starts = [found for family in self.families.values() for found in family[:2]]
        share = self.moves // (2 * len(starts))
        better = [self.improved(found, share) for found in starts]
        best = min(better, key=lambda found: found.times.score)
        return self.improved(best, self.moves - share * len(starts))

    def improved(self, found: _Found, tries: int) -> _Found:
        words, times = improve(self.problem, found.words, found.times, goal=self.goal, tries=tries)
        self.report(tries)
        return _Found(times, words)

    def report(self, more: int) -> None:
        """Count what is done, and report it."""
        self.spent += more
        if self.progress is not None:
            self.progress(self.spent, self.lists + self.moves)
