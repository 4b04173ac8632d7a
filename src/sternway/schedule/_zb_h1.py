"""ZB-H1: 1F1B's memory, and a third of its idle time, because W waits for nobody.

Rank r warms up like 1F1B and holds back its first r W's. The gradient therefore reaches the first rank
sooner, and the end of the step, where ranks would wait, is filled with W's. A rank keeps at most p - r
microbatches before their I and r between I and W: p in all, 1F1B's peak. The idle time is (p - 1)(F + I -
W).

Paper: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 and figure 2.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2 |
    rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2 |
"""

from sternway.schedule._schedule import Schedule, freeze, single_placement
from sternway.schedule._zb_order import zb_order


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: one stage a rank, r W's held back on rank r."""
    actions = []
    for rank in range(ranks):
        order = [(rank, i) for i in range(microbatches)]
        actions.append(zb_order(order, order, warmup=ranks - 1 - rank, held_back=rank))
    return freeze("zb-h1", microbatches, single_placement(ranks), actions)
