"""1F1B: after a short warm-up, one forward, one backward, in turn.

The backward of a microbatch runs as soon as it can, so rank r never keeps more than p - r microbatches. The peak memory
of p ranks is p, however many microbatches there are. The idle time is that of GPipe, (p - 1)(F + I + W).

Papers: Harlap et al., PipeDream, arXiv 1806.03377; Narayanan et al., arXiv 2006.09503 (1F1B with flush).

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 .     B0--- F2 B1--- .  B2--- |
    rank 1 |.  F0 B0--- F1 B1--- F2 B2--- .     |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement


def one_f_one_b(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: p - r forwards of warm-up on rank r, then B and F in turn."""
    actions = []
    for (stage,) in placement:
        warmup = min(microbatches, len(placement) - stage)
        steps = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(microbatches):
            steps.append(Action(stage, "B", i))
            if warmup + i < microbatches:
                steps.append(Action(stage, "F", warmup + i))
        actions.append(steps)
    return actions
