"""Looped breadth-first: several stages a rank, each run for all microbatches before the next.

With v stages a rank the pipeline fills v times faster, so its idle time is GPipe's divided by v, and a
stage's weights are needed in one stretch, which suits fully sharded data parallelism. Like GPipe, it
keeps every microbatch.

Paper: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953.

    rank 0   0F0 0F1 2F0 2F1         2B1 2B1 2B0 2B0 0B1 0B1 0B0 0B0
    rank 1       1F0 1F1 3F0 3F1 3B1 3B1 3B0 3B0 1B1 1B1 1B0 1B0
"""

from sternway.schedule._action import Action
from sternway.schedule._schedule import Schedule, freeze, looped_placement


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Return the looped breadth-first schedule: stages dealt out in turn, one stage at a time."""
    placement = looped_placement(ranks, stages_per_rank)
    actions = []
    for stages in placement:
        steps = [Action(stage, "F", i) for stage in stages for i in range(microbatches)]
        steps += [Action(stage, "B", i) for stage in reversed(stages) for i in reversed(range(microbatches))]
        actions.append(steps)
    return freeze("looped-bfs", microbatches, placement, actions)
