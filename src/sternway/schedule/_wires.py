"""When messages arrive. Those from one rank to another follow each other, as on a wire.

    sent        ├──── 1 ────┤                      a message takes ``comm``, and keeps the wire for a part of that
    sent           ├ ─ ─ ─ ─├──── 2 ────┤          (``Costs.comm_busy``): the rest is its way, and others may follow

Activations and gradients that go the same way share it: what they have in common is the link between two machines.
"""

from collections.abc import Sequence

from sternway.schedule._depends import feeds
from sternway.schedule._schedule import Schedule
from sternway.schedule._stage_costs import StageCosts


class Wires:
    """The messages of one step of a schedule. Each rank says what it has computed, in its own order."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        rank_of = schedule.stage_ranks()
        self._targets = [
            [rank_of[step // 3] for step in steps] for steps in feeds(schedule.num_stages, schedule.copies)
        ]
        self._comm, self._busy, self._n = costs.comm, costs.comm_busy, schedule.n_microbatches
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._free: dict[tuple[int, int], float] = {}  # from which rank to which: when the wire is free
        self._arrived: dict[int, float] = {}

    def send(self, rank: int, outputs: Sequence[int], end: float) -> None:
        """A rank has computed this, in the numbers of ``run``: whoever needs it elsewhere gets it."""
        for key in outputs:
            for target in self._targets[key // self._n]:
                if target != rank:
                    begin = max(end, self._free.get((rank, target), end))
                    time = self._comm[rank][target]
                    self._free[rank, target] = begin + self._busy * time
                    self._arrived[key] = begin + time

    def arrival(self, key: int, source: int, end: float, rank: int) -> float:
        """When something that ``source`` computed until ``end`` is there on ``rank``."""
        return end if source == rank else self._arrived[key]
