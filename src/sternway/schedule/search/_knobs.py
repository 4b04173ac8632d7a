"""Which list schedules to try: a few numbers that give priorities for any number of ranks.

A rank's cap is how many microbatches it takes before the first comes back. To stay busy, it needs as many as it can
process while one microbatch is away on other ranks. With half as many it starves; with twice as many W fills every gap.
Which is best depends on the costs and the limit, and is not known beforehand.

    slope 1      rank 0  F F F F . I ..      1F1B's warm-up, at equal costs
    slope 2      rank 0  F F F F F F F I ..  ZB-H2's
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sternway.schedule._costs import EPSILON
from sternway.schedule.search._list_schedule import Priorities
from sternway.schedule.search._problem import Problem

_WARM_UPS = (
    *((1.0, 1), (2.25, 0), (1.5, 1), (2.0, 1), (2.0, 2), (1.75, 1), (2.5, 1), (1.25, 1), (2.0, 0), (3.0, 1)),
    *((0.75, 1), (1.5, 2), (1.75, 0), (2.5, 0), (1.0, 2), (0.5, 1), (2.25, 2), (1.25, 0), (4.0, 1), (1.0, 0)),
)


@dataclass(frozen=True, slots=True)
class Knobs:
    """A rank's cap is base + slope * how long a microbatch is away; the rest is as in ``Priorities``."""

    slope: float
    base: int
    patience: float
    forward_first: bool
    deep_first: bool = True

    def priorities(self, problem: Problem) -> Priorities:
        """Return the priorities for this problem."""
        slowest = max(problem.work(rank, (0, 1)) for rank in range(problem.ranks))
        caps = []
        for stages, limit in zip(problem.placement, problem.limit, strict=True):
            kept = max(EPSILON, min(problem.keeps[stage] for stage in stages))
            most = min(problem.microbatches, int(limit / kept + EPSILON))
            away = problem.turnaround(min(stages), min(stages)) / slowest if slowest else 0.0
            caps.append(max(1, min(most, self.base + math.ceil(self.slope * away - EPSILON))))
        return Priorities(tuple(caps), self.patience, self.forward_first, self.deep_first)


def grid(problem: Problem) -> Iterator[Knobs]:
    """Yield the first knobs to try, the likely ones first."""
    deep = (True,) if problem.ranks == problem.num_stages else (True, False)
    for slope, base in _WARM_UPS:
        for patience in (0.5, 0.0, 1.0):
            for forward_first in (True, False):
                for deep_first in deep:
                    yield Knobs(slope, base, patience, forward_first, deep_first)


def near(knobs: Knobs) -> Iterator[Knobs]:
    """Yield knobs that differ a little in one way."""
    for change in (0.125, -0.125, 0.25, -0.25):
        yield replace(knobs, slope=max(0.0, knobs.slope + change))
        yield replace(knobs, patience=max(0.0, knobs.patience + change))
    for change in (1, -1):
        yield replace(knobs, base=max(0, knobs.base + change))
    yield replace(knobs, forward_first=not knobs.forward_first)
