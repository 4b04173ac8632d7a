"""Looped breadth-first: several stages per rank, each run for all microbatches before the next.

With v stages per rank the pipeline fills v times faster, so its idle time is that of GPipe divided by v. The weights of
a stage are needed in one stretch, which suits fully sharded data parallelism. Like GPipe, it keeps every microbatch.

Paper: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.

2 ranks, 2 microbatches, F = I = W:

    rank 0 |F0- F1- F'0 F'1 .           B'1---- B'0---- B1----- B0----- |
    rank 1 |.   F0- F1- F'0 F'1 B'1---- B'0---- B1----- B0----- .       |
"""

from sternway.schedule._action import Action
from sternway.schedule._costs import Placement


def looped_bfs(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return each rank's actions: one stage at a time."""
    actions = []
    for stages in placement:
        steps = [Action(stage, "F", i) for stage in stages for i in range(microbatches)]
        steps += [Action(stage, "B", i) for stage in reversed(stages) for i in reversed(range(microbatches))]
        actions.append(steps)
    return actions
