"""ZB-V: no idle time where F, I and W take equal time, within 1F1B's memory.

Two stages a rank, placed in a V: rank r holds stages r and 2 p - 1 - r. The first rank then also holds
the last stage, so that backward starts where forward started, and every rank keeps the same amount, p
microbatches in all.

Paper: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6 and figure 5. It needs 2 p - 1
microbatches to come into its own; with fewer, the steps of those that are missing are left out.

The steps of rank r, with a = stage r and b = stage 2 p - 1 - r:

    aF × (2(p - r) - 1)   (bF aF) × r   (bF bI bW) × (p - r)      warm-up
    (aF aI aW bF bI bW) ...                                       until every forward has run
    (aI bI) × r   (aI aW) × (p - r)   then what is left of W      cool-down

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0- F1- F2- F'0 I'0 W'0 F'1 I'1 W'1 I0- W0- F'2 I'2 W'2 I1- W1- I2- W2- .   |
    rank 1 |.   F0- F'0 F1- F'1 I'0 W'0 F2- I0- W0- F'2 I'1 W'1 I1- I'2 I2- W1- W'2 W2- |
"""

from sternway.schedule._action import Action
from sternway.schedule._schedule import Schedule, freeze, v_placement


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Return the ZB-V schedule: two stages a rank, in a V."""
    planned = max(2 * ranks - 1, microbatches)
    actions = [
        [action for action in _rank_steps(rank, ranks, planned) if action.microbatch < microbatches]
        for rank in range(ranks)
    ]
    return freeze("zb-v", microbatches, v_placement(ranks), actions)


def _rank_steps(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Return the steps of one rank, as the module's head spells them out."""
    a, b = rank, 2 * ranks - 1 - rank
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
