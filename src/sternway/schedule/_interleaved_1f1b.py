"""Interleaved 1F1B: several stages a rank, one forward and one backward in turn.

With v stages a rank, what a rank waits for at the start and at the end is v times shorter: the idle time
is that of 1F1B divided by v, for more communication and some more memory. Depth first: a round of
microbatches goes through all of a rank's stages before the next round starts.

Paper: Narayanan et al., Megatron-LM, arXiv 2104.04473. There the number of microbatches is a multiple of
the ranks; here rounds may differ by one (see ``_rounds``), so that any number works.

2 ranks, 2 microbatches, F = I = W:

    rank 0 |F0- F1- F'0 F'1 .       B'0---- .   B'1---- B0----- B1----- |
    rank 1 |.   F0- F1- F'0 B'0---- F'1 B'1---- B0----- B1----- .       |
"""

from sternway.schedule._action import Action
from sternway.schedule._rounds import in_rounds, rounds
from sternway.schedule._schedule import Schedule, freeze, looped_placement


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule: stages dealt out in turn, microbatches in rounds."""
    placement = looped_placement(ranks, stages_per_rank)
    groups = rounds(ranks, microbatches)
    actions = []
    for rank, stages in enumerate(placement):
        forward = [Action(stage, "F", i) for stage, i in in_rounds(stages, groups)]
        backward = [Action(stage, "B", i) for stage, i in in_rounds(stages[::-1], groups)]
        # The first round has to reach this rank's last stage, and its gradient to come back: two steps a
        # rank.
        warmup = (stages_per_rank - 1) * len(groups[0]) + 2 * (ranks - 1 - rank)
        warmup = min(warmup, len(forward))
        steps = forward[:warmup]
        for f, b in zip(forward[warmup:], backward, strict=False):
            steps += (f, b)
        steps += backward[len(forward) - warmup :]
        actions.append(steps)
    return freeze("interleaved-1f1b", microbatches, placement, actions)
