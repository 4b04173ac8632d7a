"""ZB-H1: the memory of 1F1B and a third of its idle time, because no other rank waits for W.

Rank r warms up like 1F1B and holds back its first r W. So the gradient reaches the first rank sooner, and the end of
the step, where ranks would wait, is filled with W. A rank keeps at most p - r microbatches before their I and r between
I and W: p in all, as 1F1B does. The idle time is (p - 1)(F + I - W).

Paper: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1 and figure 2.

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 .  I0 W0 F2 I1 W1 I2 W2 |
    rank 1 |.  F0 I0 F1 I1 W0 F2 I2 W1 W2 |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._orders import zero_bubble


def zb_h1(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: the zero-bubble order, with r W held back on rank r."""
    actions = []
    for (rank,) in placement:
        order = [(rank, i) for i in range(microbatches)]
        actions.append(zero_bubble(order, order, warmup=len(placement) - 1 - rank, held_back=rank))
    return actions
