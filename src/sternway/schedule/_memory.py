"""How much a rank keeps at each step. Only the order of its actions decides that, not their times.

On a rank with v stages, a microbatch that one of them has run forward keeps 1/v until its I,
memory_after_I/v until its W, and nothing after that. What F keeps counts from F's start; what a backward
frees counts until its end, so that an overlapped pair has both at once.
"""

from collections.abc import Iterable, Iterator

from sternway.schedule._action import Action, Overlap


def memory_steps(
    steps: Iterable[Action | Overlap], *, stages: int, memory_after_i: float
) -> Iterator[tuple[float, float]]:
    """Yield, for each step of a rank, the memory while it runs and the memory after it.

    Example:
        >>> steps = [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)]
        >>> list(memory_steps(steps, stages=1, memory_after_i=0.5))
        [(1.0, 1.0), (1.0, 0.5), (0.5, 0.0)]
    """
    # Counts, so that thirds and the like do not drift: microbatches before their I, and between I and W.
    full = split = 0
    for step in steps:
        actions = step.actions
        for action in actions:
            if action.op == "F":
                full += 1
        during = (full + split * memory_after_i) / stages
        for action in actions:
            if action.op == "W":
                split -= 1
            elif action.op != "F":
                full -= 1
                split += action.op == "I"
        yield during, (full + split * memory_after_i) / stages


def peak(steps: Iterable[Action | Overlap], *, stages: int, memory_after_i: float) -> float:
    """Return the most that a rank keeps at any step."""
    top = 0.0
    for during, after in memory_steps(steps, stages=stages, memory_after_i=memory_after_i):
        if during > top:
            top = during
        if after > top:  # I can leave more than F kept
            top = after
    return top
