"""Interleaved zero-bubble: ZB-H1's held-back W's on interleaved 1F1B's stages.

Several stages a rank shorten the wait at both ends of the step, and W's fill most of what is left of it
at the end.

Papers: Qi et al., arXiv 2401.10241; Narayanan et al., arXiv 2104.04473. torch.distributed.pipelining has
it as InterleavedZeroBubble; rounds are those of ``_rounds``, so that any number of microbatches works.

2 ranks, 2 microbatches, F = I = W:

    rank 0 |F0- F1- F'0 F'1 .   I'0 W'0 I'1 W'1 I0- W0- I1- W1- |
    rank 1 |.   F0- F1- F'0 I'0 F'1 I'1 W'0 I0- W'1 I1- W0- W1- |
"""

from sternway.schedule._rounds import in_rounds, rounds
from sternway.schedule._schedule import Schedule, freeze, looped_placement
from sternway.schedule._zb_order import zb_order


def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the interleaved zero-bubble schedule: stages dealt out in turn, r W's held back on rank r."""
    placement = looped_placement(ranks, stages_per_rank)
    groups = rounds(ranks, microbatches)
    actions = []
    for rank, stages in enumerate(placement):
        warmup = (stages_per_rank - 1) * len(groups[0]) + ranks - 1 - rank
        forward, backward = in_rounds(stages, groups), in_rounds(stages[::-1], groups)
        actions.append(zb_order(forward, backward, warmup=warmup, held_back=rank))
    return freeze("interleaved-zb", microbatches, placement, actions)
