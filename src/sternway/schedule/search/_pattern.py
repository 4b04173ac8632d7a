"""Plans that repeat the pattern of one microbatch at a fixed period: often the best when memory is short.

Why: the memory of a rank is how long a microbatch lives on it, divided by how often one comes. A list schedule only
looks at what is ready now, and with little memory its ranks get out of step; a pattern keeps them in step. The paper
"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362) repeats hand-made patterns for equal times. Here
they are made for the given times and limit, as in modulo scheduling: every step of one microbatch is put at the first
time at which its rank is free *in every period*, and the period is the shortest that memory allows.

    one microbatch   rank 0   F . . . . . I W        period 4: the times of a rank are a circle of 4
                     rank 1     F . . . I . W        rank 0 has F at 0, I at 6, which is 2, W at 7, which is 3
                     rank 2       F . I W
    repeated         rank 0   F . . . F . I W F . I W F . I W . . I W
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sternway.schedule._costs import EPSILON
from sternway.schedule.search._problem import Problem, Words

_STRETCHES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
_GROWTH = 1.01
_PERIODS = 120


@dataclass(frozen=True, slots=True)
class Pattern:
    """When each step of one microbatch starts, and how long until the next microbatch does the same."""

    period: float
    starts: tuple[float, ...]


def patterns(problem: Problem, most: int) -> list[Pattern]:
    """Return up to ``most`` patterns within the memory limit, the shortest period first, at most two of each period."""
    found = {pattern for stretch in _stretches(problem) for pattern in _fastest(problem, stretch)}
    chosen: list[Pattern] = []
    for pattern in sorted(found, key=lambda pattern: (pattern.period, pattern.starts)):
        if len(chosen) < 2 or chosen[-2].period < pattern.period:
            chosen.append(pattern)
    return chosen[:most]


def repeat(problem: Problem, pattern: Pattern) -> Words:
    """Return the plan for all microbatches: every rank's steps in the order of their times."""
    words = []
    for stages in problem.placement:
        steps = [step for stage in stages for step in range(3 * stage, 3 * stage + 3)]
        timed = [
            (pattern.starts[step] + index * pattern.period, step)
            for step in steps
            for index in range(problem.microbatches)
        ]
        timed.sort()
        words.append([step for _, step in timed])
    return words


def _stretches(problem: Problem) -> Iterator[tuple[float, float]]:
    """Yield how long F and I wait at every stage, in fractions of a step: slack that avoids clashes."""
    if problem.num_stages > 24 or problem.recompute:  # of which several are solved
        return iter([(0.0, 0.0), (0.5, 0.0), (0.0, 0.5), (0.25, 0.25)])
    return iter([(up, down) for up in _STRETCHES for down in _STRETCHES])


def _fastest(problem: Problem, stretch: tuple[float, float]) -> Iterator[Pattern]:
    """Yield the pattern with the shortest period at which it fits both the ranks and the memory limit, if any."""
    ranks = range(problem.ranks)
    keeping = [rank for rank in ranks if problem.limit[rank] > 0]  # a limit of nothing is of a rank that keeps nothing
    period = max(
        *map(problem.work, ranks), *(problem.holding(rank) / problem.limit[rank] for rank in keeping), 0.0
    )  # fmt: skip
    for _ in range(_PERIODS if period > 0 else 0):
        starts = _lay_out(problem, period, stretch)
        if starts is not None and _fits(problem, period, starts):
            yield Pattern(period, tuple(starts))
            return
        period *= _GROWTH


def _lay_out(problem: Problem, period: float, stretch: tuple[float, float]) -> list[float] | None:
    """Return the starts of one microbatch's steps, each as early as its rank's circle allows, or None."""
    duration = problem.duration
    starts = [0.0] * len(duration)
    circles = [
        _Circle(period, [], sorted((duration[3 * s + kind] for s in stages for kind in range(3)), reverse=True))
        for stages in problem.placement
    ]
    top = problem.num_stages - 1
    steps = [3 * stage for stage in range(top + 1)] + [3 * stage + 1 for stage in range(top, -1, -1)]
    now = 0.0
    for step in steps:
        stage, kind = divmod(step, 3)
        start = circles[problem.rank_of[stage]].put(now, duration[step])
        if start is None:
            return None
        starts[step] = start
        now = start + duration[step]
        if kind == 0 and stage < top:
            now += problem.hop[stage] + stretch[0] * duration[step]
        elif kind == 1 and stage > 0:
            now += problem.back[stage - 1] + stretch[1] * duration[step]
    for stage in range(top + 1):
        step = 3 * stage + 2
        weight = circles[problem.rank_of[stage]].put(starts[step - 1] + duration[step - 1], duration[step])
        if weight is None:
            return None
        starts[step] = weight
    return starts


@dataclass(slots=True)
class _Circle:
    """The period of a rank as a circle: the arcs in use, and the lengths still to place, longest first."""

    period: float
    arcs: list[tuple[float, float]]
    rest: list[float]

    def put(self, earliest: float, length: float) -> float | None:
        """Use an arc at the first time, not before ``earliest``, that leaves room for all the rest."""
        self.rest.remove(length)
        for start in self.candidates(earliest, length):
            if self.fits(start, length):
                self.arcs.append((start % self.period, length))
                if self.packs():
                    return start
                self.arcs.pop()
        return None

    def candidates(self, earliest: float, length: float) -> list[float]:
        """Return the times to try: ``earliest``, and next to each arc in use."""
        times = [earliest]
        for start, taken in self.arcs:
            for flush in (start + taken, start - length):
                wait = (flush - earliest) % self.period
                times.append(earliest + (wait if wait < self.period * (1 - EPSILON) else 0.0))
        return sorted(times)

    def fits(self, start: float, length: float) -> bool:
        """Return whether an arc overlaps none that is in use."""
        slack = EPSILON * self.period
        for other, taken in self.arcs:
            behind = (start - other) % self.period
            if behind > self.period - slack:
                behind = 0.0
            if behind < taken - slack or self.period - behind < length - slack:
                return False
        return True

    def packs(self) -> bool:
        """Return whether the rest still fits, with each length in the smallest gap that has room for it."""
        arcs = sorted(self.arcs)
        ends = [start for start, _ in arcs[1:]] + [arcs[0][0] + self.period]
        gaps = sorted(end - start - length for end, (start, length) in zip(ends, arcs, strict=True))
        for length in self.rest:
            for index, gap in enumerate(gaps):
                if gap >= length - EPSILON * self.period:
                    gaps[index] -= length
                    gaps.sort()
                    break
            else:
                return False
        return True


def _fits(problem: Problem, period: float, starts: list[float]) -> bool:
    """Return whether ranks stay within their limits once the pattern repeats: right after each of their F's starts."""
    for stages, limit in zip(problem.placement, problem.limit, strict=True):
        for at in stages:
            now = starts[3 * at] / period + EPSILON
            held = 0.0
            for stage in stages:
                begun, turned, freed = (
                    math.floor(now - (starts[step] + ended * problem.duration[step]) / period + EPSILON)
                    for step, ended in ((3 * stage, 0), (3 * stage + 1, 1), (3 * stage + 2, 1))
                )
                held += problem.keeps[stage] * (begun - turned) + problem.leaves[stage] * (turned - freed)
            if held > limit + EPSILON:
                return False
    return True
