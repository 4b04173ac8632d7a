"""ZB-V: no idle time where F, I and W take equal time, within the memory of 1F1B.

Two stages per rank, placed in a V: rank r holds stages r and 2 p - 1 - r. The first rank then also holds the last
stage, so that backward starts where forward started, and every rank keeps the same amount, p microbatches in all.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6 and figure 5. It is made for 2 p - 1
microbatches or more; with fewer, the steps of those that are missing are left out.

The steps of rank r, with a = stage r and b = stage 2 p - 1 - r:

    aF × (2(p - r) - 1)   (bF aF) × r   (bF bI bW) × (p - r)      warm-up
    (aF aI aW bF bI bW) ...                                       until every forward has run
    (aI bI) × r   (aI aW) × (p - r)   then the rest of W          cool-down

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I'1 W'1 I0- W0- F'2 I'2 W'2 I1- W1- I2- W2- .   |
    rank 1 |.   F0- F'0 F1- F'1 I'0 W'0 F2- I0- W0- F'2 I'1 W'1 I1- I'2 I2- W1- W'2 W2- |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement


def zb_v(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions, as written above."""
    planned = max(2 * len(placement) - 1, microbatches)
    return [
        [action for action in _steps(rank, placement, planned) if action.microbatch < microbatches]
        for rank in range(len(placement))
    ]


def _steps(rank: int, placement: Placement, microbatches: int) -> list[Action]:
    """Return the steps of one rank, for at least 2 p - 1 microbatches."""
    ranks, (a, b) = len(placement), placement[rank]
    script = ["aF"] * (2 * (ranks - rank) - 1) + ["bF", "aF"] * rank + ["bF", "bI", "bW"] * (ranks - rank)
    forwards_left = microbatches - (2 * ranks - 1 - rank)
    script += ["aF", "aI", "aW", "bF", "bI", "bW"] * forwards_left
    # The first stage has run all its forwards; the second has not yet.
    script += ["aI", "aW", "bF", "bI", "bW"] * (ranks - 1 - rank)
    script += ["aI", "bI"] * rank + ["aI", "aW"] * (ranks - rank) + ["bW"] * rank + ["aW"] * rank
    counts = dict.fromkeys(set(script), 0)
    steps = []
    for word in script:
        steps.append(Action(a if word[0] == "a" else b, word[1], counts[word]))  # type: ignore[arg-type]  # F, I, W
        counts[word] += 1
    return steps
