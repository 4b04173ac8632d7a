"""GPipe: all forwards, then all backwards.

The first pipeline schedule, and the simplest. Every rank keeps the activations of every microbatch, so
its memory grows with their number; 1F1B has the same idle time with less memory.

Paper: Huang et al., GPipe, arXiv 1811.06965.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 F2 .        B0--- B1--- B2--- |
    rank 1 |.  F0 F1 F2 B0--- B1--- B2--- .     |
"""

from sternway.schedule._action import Action
from sternway.schedule._schedule import Schedule, freeze, single_placement


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return the GPipe schedule: one stage a rank, every F before every B."""
    actions = [
        [Action(rank, "F", i) for i in range(microbatches)] + [Action(rank, "B", i) for i in range(microbatches)]
        for rank in range(ranks)
    ]
    return freeze("gpipe", microbatches, single_placement(ranks), actions)
