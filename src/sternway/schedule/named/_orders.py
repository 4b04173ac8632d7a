"""Orders that several schedules share: rounds of microbatches, and the zero-bubble order of F, I and W."""

from collections.abc import Sequence
from itertools import pairwise

from sternway.schedule._action import Action


def rounds(ranks: int, microbatches: int) -> list[range]:
    """Split microbatches into as many rounds of at least ``ranks`` as possible, the longer ones first.

    Example:
        >>> rounds(ranks=2, microbatches=5)
        [range(0, 3), range(3, 5)]
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    starts = [index * size + min(index, longer) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def in_rounds(stages: Sequence[int], groups: Sequence[range]) -> list[tuple[int, int]]:
    """Return (stage, microbatch) round by round: a round runs through one stage, then through the next.

    Backward goes through the stages in reverse. With 2 ranks, 2 stages each and rounds of 2, rank 0 has stages 0 and 2:

        forward   0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3
        backward  2B0 2B1 0B0 0B1 | 2B2 2B3 0B2 0B3
    """
    return [(stage, i) for group in groups for stage in stages for i in group]


def zero_bubble(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], *, warmup: int, held_back: int
) -> list[Action]:
    """Return one rank's actions in the order of the zero-bubble schedules.

        F × warmup,  then  F I (until W is held back so often),  then  F I W,  then  I W,  then the rest of W

    The W that are held back fill the end of the step, where 1F1B waits for gradients.

    Args:
        forward: (stage, microbatch) in the order of their F.
        backward: (stage, microbatch) in the order of their I, and of their W.
        warmup: the number of F before the first pair of F and I.
        held_back: the number of actions by which W follows I.
    """
    steps = [Action(stage, "F", i) for stage, i in forward[:warmup]]
    for index, (stage, i) in enumerate(backward):
        steps += [Action(s, "F", j) for s, j in forward[warmup + index : warmup + index + 1]]
        steps.append(Action(stage, "I", i))
        if index >= held_back:
            earlier_stage, earlier_i = backward[index - held_back]
            steps.append(Action(earlier_stage, "W", earlier_i))
    steps += [Action(stage, "W", i) for stage, i in backward[max(0, len(backward) - held_back) :]]
    return steps
