"""GPipe: all forwards, then all backwards.

The first pipeline schedule, and the simplest. Every rank keeps the activations of every microbatch, so its memory grows
with their number. 1F1B has the same idle time and needs less memory.

Paper: Huang et al., GPipe, arXiv 1811.06965.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 F2 .        B0--- B1--- B2--- |
    rank 1 |.  F0 F1 F2 B0--- B1--- B2--- .     |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement


def gpipe(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: every F before every B."""
    return [[Action(stage, op, i) for op in ("F", "B") for i in range(microbatches)] for (stage,) in placement]
