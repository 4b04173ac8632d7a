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
    """The messages of one step of a schedule. Each rank says what it has computed, in its own order.

    Attributes:
        arrived: when what was computed, in the numbers of ``run``, is there on the other rank that needs it.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        rank_of, self._n = schedule.stage_ranks(), schedule.n_microbatches
        self._target = [
            next((rank_of[other // 3] for other in others if rank_of[other // 3] != rank_of[step // 3]), None)
            for step, others in enumerate(feeds(schedule.num_stages, schedule.copies))
        ]
        self._comm, self._busy = costs.comm, costs.comm_busy
        self.arrived = [0.0] * (len(self._target) * self._n)
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._free: dict[tuple[int, int], float] = {}  # from which rank to which: when the wire is free

    def send(self, rank: int, outputs: Sequence[int], end: float) -> None:
        """Send what a rank has computed, if another one needs it."""
        for key in outputs:
            target = self._target[key // self._n]
            if target is not None:
                time, begin = self._comm[rank][target], end
                if self._busy:
                    begin = max(end, self._free.get((rank, target), end))
                    self._free[rank, target] = begin + self._busy * time
                self.arrived[key] = begin + time
