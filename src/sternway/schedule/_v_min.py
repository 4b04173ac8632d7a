"""V-Min: a third of 1F1B's memory, the least that a V can do, and about two thirds of its idle time.

The V of ZB-V with the shortest-lived building block there is: forward and backward both move on by one
rank a slot, down the V and up again. A rank keeps at most (p + 4) // 3 microbatches. Where F, I and W
take equal time, the idle time is at most 2 p of them, against 3 (p - 1) for 1F1B; where they do not,
ranks wait for each other in every block, and V-Half is the better choice.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; see ``_building_block``.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I0- I'1 W0- W'1 I1- W1- F'2 I'2 W'2 .   I2- W2- |
    rank 1 |.   F0- F'0 F1- F'1 I'0 I0- W'0 F2- I'1 I1- W0- F'2 W'1 W1- I'2 I2- W'2 W2- |
"""

from sternway.schedule._building_block import Block, repeat
from sternway.schedule._schedule import Schedule


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Return the V-Min schedule: two stages a rank, in a V, at most (p + 4) // 3 microbatches kept."""
    # Six slots on, a block must not meet itself. For a multiple of three ranks it would, without these two.
    gap = 2 if ranks % 3 == 0 else 0
    turn = 2 * ranks + gap
    blocks = [Block((r, 2 * ranks - r - 1, turn + r, turn + 2 * ranks - r - 1)) for r in range(ranks)]
    return repeat("v-min", blocks, microbatches, limit=2 * ((ranks + 4) // 3))
