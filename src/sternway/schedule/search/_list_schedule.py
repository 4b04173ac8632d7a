"""Build one plan in one pass: every rank, whenever it is free, takes the best step that is ready.

Why: at 64 ranks and 512 microbatches a plan has 98,304 steps, too many for an integer program. The zero-bubble paper
(arXiv 2401.10241, section 3.1) uses a pass that warms up, alternates F and I, and puts W where a gap would be. This is
such a pass. A small record of ``Priorities`` says which step to prefer; the search tries many and keeps the best.

    rank 0   F F F F . I W F I W F I W I W . I W      in flight: at most the caps, within the memory limit
    rank 1     F F F I F I W F I W I F W I W   W      [1] I before F, or F before I: the priorities decide
    rank 2       F F I F I W F I F I W I W W W        [2] W where the wait is long enough, or memory is short
    rank 3         F I F I F I F I W W W W

``refill`` runs the same pass over a given plan: it keeps the order of F and I and only places W anew. A named schedule,
or a pattern, has a good order of F and I, but its W fill the gaps that equal costs would leave.

    given       F F F . I W F I W ..     W right after I
    refilled    F F F . I F I . W ..     .. but the next I arrives late: W waits for that gap
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from sternway.schedule._costs import EPSILON
from sternway.schedule.search._problem import Problem, Words

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Priorities:
    """What ranks prefer, where they have a choice.

    Args:
        caps: for each rank, how many microbatches may be between their first F and last I on it.
        patience: a rank waits for a known arrival rather than run a W of which less than this fraction fits before it.
        forward_first: whether F goes before I where both are ready; [1] in the picture.
        deep_first: whether, of a rank's stages, the one nearest to the loss goes first.
    """

    caps: tuple[int, ...]
    patience: float
    forward_first: bool
    deep_first: bool = True


def list_schedule(problem: Problem, priorities: Priorities) -> Words:
    """Return the plan that these priorities make; it is always complete and within the memory limit."""
    return _Free(problem, priorities).run()


def refill(problem: Problem, words: Words, patience: float) -> Words | None:
    """Return the plan with F and I in the same order and W placed anew; None if a rank then runs out of memory."""
    filled = _Refill(problem, words, patience).run()
    return filled if all(len(new) == len(old) for new, old in zip(filled, words, strict=True)) else None


class _ListPass(ABC):
    """The state of one pass: when each rank is free, what has arrived, and what each rank holds."""

    __slots__ = ("arrivals", "change", "done", "events", "free", "held", "patience", "problem", "stages", "words")

    def __init__(self, problem: Problem, patience: float, *, deep_first: bool) -> None:
        self.problem, self.patience = problem, patience
        self.arrivals: list[list[float]] = [[] for _ in problem.duration]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.done = [0] * len(problem.duration)
        self.free = [0.0] * problem.ranks
        self.held = [0.0] * problem.ranks
        self.words: Words = [[] for _ in range(problem.ranks)]
        self.events: list[tuple[float, int]] = [(0.0, 0)]
        self.change = problem.cautious_change
        self.stages = [sorted(stages, reverse=deep_first) for stages in problem.placement]

    @abstractmethod
    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the step to start now; or -1, and when to look again."""

    def run(self) -> Words:
        events, free, words = self.events, self.free, self.words
        duration = self.problem.duration
        pop, push = heapq.heappop, heapq.heappush
        while events:
            now, rank = pop(events)
            if now < free[rank]:
                continue  # it has started something else since
            step, wake = self.choose(rank, now)
            if step >= 0:
                words[rank].append(step)
                free[rank] = end = now + duration[step]
                self.deliver(rank, step, end)
                push(events, (end, rank))
            elif wake < _NEVER:
                push(events, (wake, rank))
        return words

    def deliver(self, rank: int, step: int, end: float) -> None:
        """Count the step, pass its result on, and wake the rank that gets it."""
        self.done[step] += 1
        self.held[rank] += self.change[step]
        for target, delay, receiver in self.problem.feeds[step]:
            arrival = end + delay
            self.arrivals[target].append(arrival)
            if receiver != rank:
                heapq.heappush(self.events, (max(arrival, self.free[receiver]), receiver))

    def fill(self, stages: list[int], now: float, wake: float, short: bool) -> tuple[int, float]:
        """Return a W for the wait until ``wake``, if one fits or memory is short; [2] in the picture."""
        done, duration, patience = self.done, self.problem.duration, self.patience
        for stage in stages:
            step = 3 * stage + 2
            if done[step] < len(self.arrivals[step]) and (short or wake - now >= patience * duration[step] - EPSILON):
                return step, now
        return -1, wake


@final
class _Free(_ListPass):
    """A pass that chooses F and I by priorities."""

    __slots__ = ("priorities", "reserve")

    def __init__(self, problem: Problem, priorities: Priorities) -> None:
        super().__init__(problem, priorities.patience, deep_first=priorities.deep_first)
        self.priorities = priorities
        # The most that a rank may hold when F starts. F leaves room for one microbatch through the rank's later stages:
        # the microbatch that has got furthest can then always go on, so that ranks never fill up (the proof is in the
        # tests).
        self.reserve: list[float] = [0.0] * problem.num_stages
        for stages, limit in zip(problem.placement, problem.limit, strict=True):
            room = limit + EPSILON
            for stage in sorted(stages, reverse=True):
                room -= self.change[3 * stage]
                self.reserve[stage] = room

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        done, arrivals, priorities = self.done, self.arrivals, self.priorities
        held, cap, soon = self.held[rank], priorities.caps[rank], now + EPSILON
        wake = _NEVER
        ready = blocked = -1
        stages = self.stages[rank]
        first = min(stages) if len(stages) > 1 else stages[0]
        for stage in stages:
            step = 3 * stage
            count = done[step]
            inputs = arrivals[step]
            if count < len(inputs) and (stage != first or count - done[step + 1] < cap):
                if held > self.reserve[stage]:
                    if inputs[count] <= soon:
                        blocked = stage
                elif inputs[count] > soon:
                    wake = min(wake, inputs[count])
                elif ready < 0:
                    ready = step
        if ready >= 0 and priorities.forward_first:
            return ready, now
        for stage in stages:
            step = 3 * stage + 1
            count = done[step]
            inputs = arrivals[step]
            if count < len(inputs):
                if inputs[count] <= soon:
                    return step, now
                wake = min(wake, inputs[count])
        if ready >= 0:
            return ready, now
        return self.fill(stages, now, wake, blocked >= 0)


@final
class _Refill(_ListPass):
    """A pass that takes each rank's F and I from a given plan."""

    __slots__ = ("order", "position")

    def __init__(self, problem: Problem, words: Words, patience: float) -> None:
        super().__init__(problem, patience, deep_first=True)
        self.order = [[step for step in word if step % 3 != 2] for word in words]
        self.position = [0] * problem.ranks

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        order, position = self.order[rank], self.position[rank]
        stages = self.stages[rank]
        if position == len(order):
            return self.fill(stages, now, _NEVER, short=True)
        step = order[position]
        inputs, count = self.arrivals[step], self.done[step]
        arrival = inputs[count] if count < len(inputs) else _NEVER
        # F needs its own room only: the given order can run.
        room = self.problem.limit[rank] + EPSILON
        short = step % 3 == 0 and self.held[rank] + self.change[step] > room
        if arrival <= now and not short:
            self.position[rank] = position + 1
            return step, now
        return self.fill(stages, now, _NEVER if short else arrival, short=short and arrival <= now)
