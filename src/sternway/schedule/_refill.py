"""Keep a plan's order of F and I, and place its W anew: in the gaps that these costs really leave.

Why: a named schedule, or a pattern, has a good order of F and I but was laid out for other times; its W
stand where gaps would be if all steps took equally long. Which gaps there are is known only as the plan is
timed, so this is a list schedule again, with nothing left to choose but when to run W.

    given       F F F . I W F I W ..     W right after I, as the plan had it
    refilled    F F F . I F I . W ..     .. but the next I arrives late: W waits for that gap
"""

from sternway.schedule._list_schedule import ListPass, Policy
from sternway.schedule._problem import Problem, Words

_NEVER = float("inf")


def refill(problem: Problem, words: Words, patience: float) -> Words | None:
    """Return words with F and I in the same order and W placed anew; None if memory then stops a rank."""
    filled = _Refill(problem, words, patience).run()
    return filled if all(len(new) == len(old) for new, old in zip(filled, words, strict=True)) else None


class _Refill(ListPass):
    """A list schedule that takes each rank's F and I from a given plan."""

    __slots__ = ("order", "position", "room")

    def __init__(self, problem: Problem, words: Words, patience: float) -> None:
        super().__init__(problem, Policy((), patience, forward_first=False))
        self.order = [[step for step in word if step % 3 != 2] for word in words]
        self.position = [0] * problem.ranks
        self.room = max(self.reserve)  # F needs no more than its own room: the given order gets on by itself

    def choose(self, rank: int, now: float) -> tuple[int, float]:
        """Return the plan's next F or I if it can start, or a W for the wait."""
        order, position = self.order[rank], self.position[rank]
        slots = self.slots[rank]
        if position == len(order):
            return self.fill(slots, now, _NEVER, short=True)
        step = order[position]
        inputs, count = self.arrivals[step], self.done[step]
        arrival = inputs[count] if count < len(inputs) else _NEVER
        short = step % 3 == 0 and self.held[rank] > self.room
        if arrival <= now and not short:
            self.position[rank] = position + 1
            return step, now
        return self.fill(slots, now, _NEVER if short else arrival, short=short and arrival <= now)
