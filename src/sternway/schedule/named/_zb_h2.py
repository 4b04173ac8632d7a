"""ZB-H2: no idle time where F, I and W take equal time, for twice the memory of 1F1B.

More forwards before the first backward fill the start of the step, and W that is held back fills its end: rank r runs
2 (p - r) - 1 forwards before its first I and holds back 2 r W, so every rank keeps 2 p - 1 microbatches. The idle time
is (p - 1)(F + I - 2 W), or none.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.2 and figure 3.

2 ranks, 4 microbatches, F = I = W:

    rank 0 |F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .  |
    rank 1 |.  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement
from sternway.schedule.named._orders import zero_bubble


def zb_h2(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: the zero-bubble order, with 2 r W held back on rank r."""
    actions = []
    for (rank,) in placement:
        order = [(rank, i) for i in range(microbatches)]
        actions.append(zero_bubble(order, order, warmup=2 * (len(placement) - 1 - rank), held_back=2 * rank))
    return actions
