"""1F1B: after a short warm-up, one forward, one backward, in turn.

A microbatch's backward runs as soon as it can, so that rank r never keeps more than p - r microbatches: p
ranks' peak memory is p, however many microbatches there are. The idle time, (p - 1)(F + I + W), is
GPipe's.

Papers: Harlap et al., PipeDream, arXiv 1806.03377; Narayanan et al., arXiv 2006.09503 (1F1B with flush).

2 ranks, 3 microbatches, F = I = W:

    rank 0 |F0 F1 .     B0--- F2 B1--- .  B2--- |
    rank 1 |.  F0 B0--- F1 B1--- F2 B2--- .     |
"""

from sternway.schedule._action import Action
from sternway.schedule._schedule import Schedule, freeze, single_placement


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule: one stage a rank, p - r forwards of warm-up on rank r."""
    actions = []
    for rank in range(ranks):
        warmup = min(microbatches, ranks - rank)
        steps = [Action(rank, "F", i) for i in range(warmup)]
        for i in range(microbatches):
            steps.append(Action(rank, "B", i))
            if warmup + i < microbatches:
                steps.append(Action(rank, "F", warmup + i))
        actions.append(steps)
    return freeze("1f1b", microbatches, single_placement(ranks), actions)
