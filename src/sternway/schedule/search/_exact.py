"""Small problems, solved exactly: branch and bound over what each rank could do next.

Why: with a handful of microbatches a list schedule can be one step worse than the best, and the whole tree is small
enough to search. Branching follows Giffler and Thompson ("Algorithms for solving production-scheduling problems",
1960): of all steps that could come next, take the one that would end first. Some step on its rank must start before
that end, or this one could be inserted for free. So only the steps of that rank that start before then are tried.

              could end first: I on rank 1, at 7
    rank 0    .. F F|          F at 5..8          not looked at yet
    rank 1    .. F|            I at 5..7, W at 5..6.5, F at 6..9      three branches; an F at 7 would be none

With one stage per rank this is exact: a step that is inserted earlier delays no other, and an F that fits in memory
now, being the next F of its rank, still fits wherever it is inserted. With several stages, F of another stage may need
that memory, and the tree does not have all plans.
"""

from dataclasses import dataclass

from sternway.schedule._costs import EPSILON
from sternway.schedule.search._clock import Score, Times, clock
from sternway.schedule.search._problem import Problem, Words

_FRONT = 12
_ORDER = (1, 0, 2)


@dataclass(frozen=True, slots=True)
class Solved:
    """The best plan found, and whether it is proven that there is no better one."""

    words: Words
    times: Times
    certain: bool


def branch_and_bound(problem: Problem, words: Words, times: Times, *, goal: float, nodes: int) -> Solved:
    """Return words at least as good as those given.

    Looks at no more than ``nodes`` partial plans, and stops at a span of ``goal``, below which there is none.
    """
    tree = _Branching(problem, words, times.score, goal, nodes)
    tree.visit()
    timed = clock(problem, tree.best)
    assert timed is not None, "a plan of the tree runs to its end"
    never_more = all(left <= kept for left, kept in zip(problem.leaves, problem.keeps, strict=True))
    straight = problem.ranks == problem.num_stages and never_more
    return Solved(tree.best, timed, timed.score.span <= goal or (straight and tree.nodes > 0))


class _Branching:
    """The plan so far, and the best complete one; ``visit`` undoes whatever it changes."""

    def __init__(self, problem: Problem, best: Words, score: Score, goal: float, nodes: int) -> None:
        self.problem, self.best, self.score, self.goal, self.nodes = problem, best, score, goal, nodes
        self.arrivals: list[list[float]] = [[] for _ in problem.duration]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.done = [0] * len(problem.duration)
        self.heads = [problem.forward_lag(0, min(stages)) for stages in problem.placement]
        self.free = list(self.heads)
        self.held = [0.0] * problem.ranks
        self.words: Words = [[] for _ in range(problem.ranks)]
        self.fronts: dict[tuple[int, ...], list[list[float]]] = {}

    def visit(self) -> None:
        """Try every branch below the plan so far that could still beat the best."""
        if self.nodes <= 0 or self.score.span <= self.goal:
            return
        self.nodes -= 1
        if self.least_span() >= self.score.span * (1 - EPSILON) or self.dominated():
            return
        branches = self.branches()
        if not branches:
            self.keep()
        for rank, step, start in branches:
            self.descend(rank, step, start)

    def branches(self) -> list[tuple[int, int, float]]:
        """Return (rank, step, start) for the steps that may come next."""
        problem = self.problem
        change = problem.cautious_change
        soonest, chosen = float("inf"), -1
        ready: list[list[tuple[float, int]]] = []
        for rank, stages in enumerate(problem.placement):
            mine, room = [], problem.limit[rank] + EPSILON - self.held[rank]
            for stage in stages:
                for kind in _ORDER:
                    step = 3 * stage + kind
                    count = self.done[step]
                    if count >= len(self.arrivals[step]) or (kind == 0 and change[step] > room):
                        continue
                    start = max(self.free[rank], self.arrivals[step][count])
                    mine.append((start, step))
                    if start + problem.duration[step] < soonest:
                        soonest, chosen = start + problem.duration[step], rank
            ready.append(mine)
        if chosen < 0:
            return []
        first = min(start for start, _ in ready[chosen])
        return [(chosen, step, start) for start, step in ready[chosen] if start < soonest or start == first]

    def descend(self, rank: int, step: int, start: float) -> None:
        """Add a step, visit what follows, and remove it again."""
        problem, arrivals = self.problem, self.arrivals
        free, held = self.free[rank], self.held[rank]
        self.free[rank] = end = start + problem.duration[step]
        self.held[rank] += problem.cautious_change[step]
        self.done[step] += 1
        self.words[rank].append(step)
        for target, delay, _ in problem.feeds[step]:
            arrivals[target].append(end + delay)
        self.visit()
        for target, _, _ in problem.feeds[step]:
            arrivals[target].pop()
        self.words[rank].pop()
        self.done[step] -= 1
        self.free[rank], self.held[rank] = free, held

    def least_span(self) -> float:
        """Return a lower bound of the longest span, whatever follows."""
        problem, done, total = self.problem, self.done, self.problem.microbatches
        duration, hop, rank_of = problem.duration, problem.hop, problem.rank_of
        ends = list(self.free)
        for step, count in enumerate(done):
            ends[rank_of[step // 3]] += (total - count) * duration[step]
        last = 0.0
        for stage in range(problem.num_stages):  # the last F, on its way up
            step = 3 * stage
            left = total - done[step]
            if left:
                mine = self.free[rank_of[stage]] + left * duration[step]
                last = max(mine, last + duration[step])
            else:
                last = 0.0
            last += hop[stage] if left else 0.0
        for stage in range(problem.num_stages - 1, -1, -1):  # the last I, on its way down
            step = 3 * stage
            left = total - done[step + 1]
            if not left:
                last = 0.0
                continue
            rank = rank_of[stage]
            mine = self.free[rank] + (total - done[step]) * duration[step] + left * duration[step + 1]
            last = max(mine, last + duration[step + 1])
            ends[rank] = max(ends[rank], last + duration[step + 2])
            last += problem.back[stage - 1] if stage else 0.0
        return max(end - head for end, head in zip(ends, self.heads, strict=True))

    def dominated(self) -> bool:
        """Return whether the same steps were done before at times that are nowhere later; remember these times."""
        times = list(self.free)
        for step, count in enumerate(self.done):
            if step % 3 != 2:
                times.extend(self.arrivals[step][count:])
        front = self.fronts.setdefault(tuple(self.done), [])
        for other in front:
            if all(a <= b for a, b in zip(other, times, strict=True)):
                return True
        if len(front) < _FRONT:
            front.append(times)
        return False

    def keep(self) -> None:
        """Keep the plan as the best if it is complete and better; it is incomplete if memory ran out."""
        if sum(map(len, self.words)) < self.problem.num_steps:
            return
        timed = clock(self.problem, self.words)
        if timed is not None and timed.score < self.score:
            self.best = [list(word) for word in self.words]
            self.score = timed.score
