"""The order that the zero-bubble schedules share: forwards, then F, I, W in turn, the first W's held back.

    F × warmup,  then  F I (as often as W is held back),  then  F I W,  then  I W,  then what is left of W

Held-back W's are what fills the end of the step, where 1F1B waits for gradients.
"""

from collections.abc import Sequence

from sternway.schedule._action import Action


def zb_order(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], *, warmup: int, held_back: int
) -> list[Action]:
    """Return one rank's actions.

    Args:
        forward: (stage, microbatch) in the order of their F.
        backward: (stage, microbatch) in the order of their I, and of their W.
        warmup: how many F run before the first pair of F and I.
        held_back: by how many actions W trails I.
    """
    steps = [Action(stage, "F", i) for stage, i in forward[:warmup]]
    for index, (stage, i) in enumerate(backward):
        if warmup + index < len(forward):
            next_stage, next_i = forward[warmup + index]
            steps.append(Action(next_stage, "F", next_i))
        steps.append(Action(stage, "I", i))
        if index >= held_back:
            earlier_stage, earlier_i = backward[index - held_back]
            steps.append(Action(earlier_stage, "W", earlier_i))
    steps += [Action(stage, "W", i) for stage, i in backward[max(0, len(backward) - held_back) :]]
    return steps
