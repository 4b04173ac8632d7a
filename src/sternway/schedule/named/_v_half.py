"""V-Half: half the memory of 1F1B, and about half of its idle time.

The V of ZB-V with a shorter-lived building block: forward and backward each take two slots per rank down the V and one
slot per rank up. A rank keeps at most (p + 2) // 2 microbatches. Where F, I and W take equal time, the idle time is at
most 3 p / 2 of them; that of 1F1B is 3 (p - 1). Where they do not, it stays about that much however many microbatches
there are, as long as W + 2 I >= 2 F and W + 2 F >= 2 I.

Paper: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; see ``_building_block``.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I'1 I0- W'1 W0- F'2 I'2 I1- W'2 I2- W1- W2- .   |
    rank 1 |.   F0- F'0 F1- F'1 I'0 I0- W'0 F2- W0- F'2 I'1 I1- I'2 I2- W'1 W1- W'2 W2- |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._building_block import BuildingBlock, repeat


def v_half(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: at most (p + 2) // 2 microbatches kept."""
    p = len(placement)
    # Six slots later, a block must not meet itself. For an even number of ranks it would, without a gap of three slots:
    # on a few ranks between forward and backward; on more where the V turns up, twice, since otherwise ranks wait for
    # each other in every block if I takes longer than F.
    turn, up = (0, 0) if p % 2 else (3, 0) if p <= 4 else (0, 3)
    backward = 3 * p - 1 + up + turn
    blocks: list[BuildingBlock] = [
        (2 * r, 3 * p - 2 - r + up, backward + 2 * r, backward + 3 * p - 1 - r + up) for r in range(p)
    ]
    return repeat(placement, blocks, microbatches, limit=2 * ((p + 2) // 2))
