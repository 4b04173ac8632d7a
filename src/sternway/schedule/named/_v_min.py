"""V-Min: a third of the memory of 1F1B, the least that a V can have, and about two thirds of its idle time.

The V of ZB-V with the shortest-lived building block: forward and backward both move by one rank per slot, down the V
and up again. A rank keeps at most (p + 4) // 3 microbatches. Where F, I and W take equal time, the idle time is at most
2 p of them; that of 1F1B is 3 (p - 1). Where they do not, ranks wait for each other in every block, and V-Half is the
better choice.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; see ``_building_block``.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I0- I'1 W0- W'1 I1- W1- F'2 I'2 W'2 .   I2- W2- |
    rank 1 |.   F0- F'0 F1- F'1 I'0 I0- W'0 F2- I'1 I1- W0- F'2 W'1 W1- I'2 I2- W'2 W2- |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._building_block import BuildingBlock, repeat


def v_min(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: at most (p + 4) // 3 microbatches kept."""
    p = len(placement)
    # Six slots later, a block must not meet itself. For a multiple of three ranks it would, without this gap.
    gap = 2 if p % 3 == 0 else 0
    turn = 2 * p + gap
    blocks: list[BuildingBlock] = [(r, 2 * p - r - 1, turn + r, turn + 2 * p - r - 1) for r in range(p)]
    return repeat(placement, blocks, microbatches, limit=2 * ((p + 4) // 3))
