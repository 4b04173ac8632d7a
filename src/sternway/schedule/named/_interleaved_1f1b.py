"""Interleaved 1F1B: several stages per rank, one forward and one backward in turn.

With v stages per rank, the waits at the start and at the end are v times shorter: the idle time is that of 1F1B divided
by v, at the price of more messages and some more memory. Depth first: a round of microbatches goes through all of a
rank's stages before the next round starts.

Paper: Narayanan et al., Megatron-LM, arXiv 2104.04473. There the number of microbatches is a multiple of the
ranks; here rounds may differ by one (see ``_orders``), so that any number works.

2 ranks, 2 microbatches, F = I = W:

    rank 0 |F0- F1- F'0 F'1 .       B'0---- .   B'1---- B0----- B1----- |
    rank 1 |.   F0- F1- F'0 B'0---- F'1 B'1---- B0----- B1----- .       |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._orders import in_rounds, rounds


def interleaved_1f1b(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: a warm-up, then F and B in turn, both in rounds."""
    ranks = len(placement)
    groups = rounds(ranks, microbatches)
    actions = []
    for rank, stages in enumerate(placement):
        forward = [Action(stage, "F", i) for stage, i in in_rounds(stages, groups)]
        backward = [Action(stage, "B", i) for stage, i in in_rounds(stages[::-1], groups)]
        # The first round must reach this rank's last stage, and its gradient come back: two steps for each rank.
        warmup = min((len(stages) - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forward))
        steps = forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            steps += (f, b)
        steps += backward[len(forward) - warmup :]
        actions.append(steps)
    return actions
