"""V-Half: half of 1F1B's memory, and about half of its idle time.

The V of ZB-V with a shorter-lived building block: forward goes down the V at two slots a rank and up at
one, backward likewise. A rank keeps at most (p + 2) // 2 microbatches. Where F, I and W take equal time,
the idle time is at most 3 p / 2 of them, against 3 (p - 1) for 1F1B.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; see ``_building_block``.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I'1 I0- W'1 W0- F'2 I'2 I1- W'2 I2- W1- W2- .   |
    rank 1 |.   F0- F'0 F1- F'1 I'0 I0- W'0 F2- W0- F'2 I'1 I1- I'2 I2- W'1 W1- W'2 W2- |
"""

from sternway.schedule._building_block import Block, repeat
from sternway.schedule._schedule import Schedule


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Return the V-Half schedule: two stages a rank, in a V, at most (p + 2) // 2 microbatches kept."""
    # Six slots on, a block must not meet itself. For an even number of ranks it would, without these three.
    gap = 3 if ranks % 2 == 0 else 0
    turn = 3 * ranks + gap
    blocks = [Block((2 * r, 3 * ranks - r - 2, turn + 2 * r - 1, turn + 3 * ranks - r - 2)) for r in range(ranks)]
    return repeat("v-half", blocks, microbatches, limit=2 * ((ranks + 2) // 2))
