"""Interleaved zero-bubble: the stages of interleaved 1F1B, with W held back as in ZB-H1.

Several stages per rank shorten the wait at both ends of the step, and W fills most of the rest at the end.

Papers: Qi et al., arXiv 2401.10241; Narayanan et al., arXiv 2104.04473. torch.distributed.pipelining has
it as InterleavedZeroBubble; rounds are those of ``_orders``, so that any number of microbatches works.

2 ranks, 2 microbatches, F = I = W:

    rank 0 |F0- F1- F'0 F'1 .   I'0 W'0 I'1 W'1 I0- W0- I1- W1- |
    rank 1 |.   F0- F1- F'0 I'0 F'1 I'1 W'0 I0- W'1 I1- W0- W1- |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._orders import in_rounds, rounds, zero_bubble


def interleaved_zb(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: the zero-bubble order in rounds, with r W held back on rank r."""
    ranks = len(placement)
    groups = rounds(ranks, microbatches)
    actions = []
    for rank, stages in enumerate(placement):
        warmup = (len(stages) - 1) * len(groups[0]) + ranks - 1 - rank
        forward, backward = in_rounds(stages, groups), in_rounds(stages[::-1], groups)
        actions.append(zero_bubble(forward, backward, warmup=warmup, held_back=rank))
    return actions
