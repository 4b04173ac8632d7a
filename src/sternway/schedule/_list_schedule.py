"""Build one plan in one pass: every rank, whenever it is free, takes the best step that is ready.

Why: at 64 ranks and 512 microbatches a plan has 98,304 steps, and an integer program over them is out of
reach. The zero-bubble paper (arXiv 2401.10241, section 3.1) replaces it by a pass that warms up, alternates
F and I, and puts W where a gap would be. This is such a pass, told by a small ``Policy`` what to prefer;
the search runs it under many policies and keeps the best.

    rank 0   F F F F . I W F I W F I W I W . I W      in flight: at most the policy's caps, within the limit
    rank 1     F F F I F I W F I W I F W I W   W      [1] I before F, or F before I: the policy says
    rank 2       F F I F I W F I F I W I W W W        [2] W where the wait is long enough, or memory is short
                   F I F I F I F I W W W W
"""

import heapq
from dataclasses import dataclass

from sternway.schedule._problem import EPSILON, Problem, Words

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Policy:
    """What ranks prefer, where they have a choice.

    Args:
        caps: for each rank, how many microbatches may be between their first F and last I on it.
        patience: a rank waits for a known arrival rather than run a W of which less than this part fits
            before.
        forward_first: whether F goes before I where both are ready; [1] in the picture.
        deep_first: whether, of a rank's stages, the one nearer to the loss goes first.
    """

    caps: tuple[int, ...]
    patience: float
    forward_first: bool
    deep_first: bool = True


def list_schedule(problem: Problem, policy: Policy) -> Words:
    """Return the words of the plan that this policy makes; it always ends, and always keeps to the limit."""
    return ListPass(problem, policy).run()


class ListPass:
    """The state of one pass: who is free when, what has arrived, what each rank holds."""

    __slots__ = (
        "arrivals",
        "done",
        "events",
        "free",
        "held",
        "policy",
        "problem",
        "reserve",
        "slots",
        "words",
    )

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        self.arrivals: list[list[float]] = [[] for _ in problem.duration]
        self.arrivals[0] = [0.0] * problem.microbatches
        self.done = [0] * len(problem.duration)
        self.free = [0.0] * problem.ranks
        self.held = [0.0] * problem.ranks
        self.words: Words = [[] for _ in range(problem.ranks)]
        self.events: list[tuple[float, int]] = [(0.0, 0)]
        keeps = max(problem.keeps, problem.leaves)
        # F leaves room for one microbatch through the rank's later stages: whatever has got furthest can then
        # always go on, so that ranks never fill up with beginnings (the argument is in the tests).
        self.reserve: list[float] = [0.0] * problem.num_stages
        self.slots: list[list[int]] = []
        for stages in problem.placement:
            for slot, stage in enumerate(sorted(stages)):
                self.reserve[stage] = problem.limit + EPSILON - keeps * (len(stages) - slot)
            self.slots.append(sorted(stages, reverse=policy.deep_first))

    def run(self) -> Words:
        events, free, words = self.events, self.free, self.words
        duration = self.problem.duration
        pop, push = heapq.heappop, heapq.heappush
        while events:
            now, rank = pop(events)
            if now < free[rank]:
                continue  # it took up something else meanwhile
            step, wake = self.choose(rank, now)
            if step >= 0:
                words[rank].append(step)
                free[rank] = end = now + duration[step]
                self.deliver(rank, step, end)
                push(events, (end, rank))
            elif wake < _NEVER:
                push(events, (wake, rank))
        return words

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the step to take up now; or -1, and when to look again."""
        done, arrivals, policy = self.done, self.arrivals, self.policy
        held, cap, soon = self.held[rank], policy.caps[rank], now + EPSILON
        wake = _NEVER
        ready = blocked = -1
        slots = self.slots[rank]
        first = min(slots) if len(slots) > 1 else slots[0]
        for stage in slots:
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
        if ready >= 0 and policy.forward_first:
            return ready, now
        for stage in slots:
            step = 3 * stage + 1
            count = done[step]
            inputs = arrivals[step]
            if count < len(inputs):
                if inputs[count] <= soon:
                    return step, now
                wake = min(wake, inputs[count])
        if ready >= 0:
            return ready, now
        return self.fill(slots, now, wake, blocked >= 0)

    def fill(self, slots: list[int], now: float, wake: float, short: bool) -> tuple[int, float]:
        """Return a W for the wait until ``wake``, if one fits or memory is short; [2] in the picture."""
        done, duration, patience = self.done, self.problem.duration, self.policy.patience
        for stage in slots:
            step = 3 * stage + 2
            if done[step] < done[step - 1] and (short or wake - now >= patience * duration[step] - EPSILON):
                return step, now
        return -1, wake

    def deliver(self, rank: int, step: int, end: float) -> None:
        """Count the step, hand its result on, and wake the rank that gets it."""
        problem, arrivals = self.problem, self.arrivals
        self.done[step] += 1
        stage, kind = divmod(step, 3)
        keeps = max(problem.keeps, problem.leaves)
        if kind == 0:
            self.held[rank] += keeps
            if stage + 1 == problem.num_stages:
                arrivals[step + 1].append(end)
                return
            to, arrival = stage + 1, end + problem.hop[stage]
            arrivals[step + 3].append(arrival)
        elif kind == 1:
            self.held[rank] -= keeps - problem.leaves
            if stage == 0:
                return
            to, arrival = stage - 1, end + problem.hop[stage - 1]
            arrivals[step - 3].append(arrival)
        else:
            self.held[rank] -= problem.leaves
            return
        receiver = problem.rank_of[to]
        if receiver != rank:
            heapq.heappush(self.events, (max(arrival, self.free[receiver]), receiver))
