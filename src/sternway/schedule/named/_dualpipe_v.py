"""DualPipeV: forwards overlapped with backwards, so that each hides the communication of the other.

Placed in a V like ZB-V: rank r holds stages r (a) and 2 p - 1 - r (b). In the steady state a rank runs two overlapped
pairs in turn, aF with bB and bF with aB. What a pair hides is communication inside a stage, such as the all-to-all of
expert parallelism. How much that saves is ``Costs.overlap``; where it is 1, a pair takes the time of both, and ZB-V has
less idle time. This schedule is for runtimes that overlap.

Paper: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, section 3.2.1; the "cut in half" V form is that of
their DualPipe repository and of torch.distributed.pipelining. It needs at least 2 p microbatches.

    aF × 2(p-r-1)   (aF bF) × (r+1)   (bI bW bF) × (p-r-1)        warm-up
    (aF+bB  bF+aB) × (m - 2p + r + 1)                             + marks an overlapped pair
    (bB  bF+aB) × (p-r-1)   (bB aB) × (r+1)                       the second half as I, its W queued
    (W  aI) × (p-r-1)   W × (r+1)                                 the queued W, in order

2 ranks, 4 microbatches, F = I = W:

    rank 0 |F0- F1 F2- F'0 I'0W'0 F'1 +3-------- .  +'2------- B'2--- .   +'3------- B'3--- I2- W2- I3 W3- |
    rank 1 |.   F0 F'0 F1- F'1F2- B'0--- +'2------- +3-------- +'3------- B'2--- B2----- .  I'3 I3- W'3W3- |
"""

from collections import deque
from collections.abc import Mapping

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Op, Overlap
from sternway.schedule._costs import Placement


def dualpipe_v(placement: Placement, microbatches: int) -> list[list[Action | Overlap]]:
    """Return each rank's actions, as written above.

    Raises:
        ScheduleError: fewer than 2 * ranks microbatches.
    """
    ranks = len(placement)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe-v needs at least two microbatches per rank, {2 * ranks} for {ranks} ranks",
            got=str(microbatches),
            fix=f"use {2 * ranks} or more, or zb-v, which takes any number",
        )
    return [RankWriter(rank, ranks, a, b).steps(microbatches) for rank, (a, b) in enumerate(placement)]


class RankWriter:
    """Writes the steps of one rank with stages a and b, counting microbatches and queueing W.

    A stage in ``begins`` starts with that microbatch instead of microbatch 0.
    """

    def __init__(self, rank: int, ranks: int, a: int, b: int, begins: Mapping[int, int] | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self.a, self.b, self.begins = a, b, begins or {}
        self.written: list[Action | Overlap] = []
        self.queue: deque[Action] = deque()
        self.counts: dict[tuple[int, bool], int] = {}

    def next(self, stage: int, op: Op) -> Action:
        """Return the next F, or the next backward, of a stage."""
        key = (stage, op == "F")
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        return Action(stage, op, self.begins.get(stage, 0) + count)

    def run(self, stage: int, op: Op) -> None:
        action = self.next(stage, op)
        self.written.append(action)
        if op == "I":
            self.queue.append(Action(stage, "W", action.microbatch))

    def overlap(self, forward: int, backward: int) -> None:
        self.written.append(Overlap(self.next(forward, "F"), self.next(backward, "B")))

    def weight(self) -> None:
        if self.queue:
            self.written.append(self.queue.popleft())

    def steps(self, microbatches: int) -> list[Action | Overlap]:
        """Return the steps."""
        rank, below, a, b = self.rank, self.ranks - 1 - self.rank, self.a, self.b
        for _ in range(2 * below):
            self.run(a, "F")
        for _ in range(rank + 1):
            self.run(a, "F")
            self.run(b, "F")
        for _ in range(below):
            self.run(b, "I")
            self.weight()
            self.run(b, "F")
        for index in range(microbatches - 2 * self.ranks + rank + 1):
            if index == 0 and below == 0:
                # On the last rank nothing is under way yet, so a pair would only wait longer.
                self.run(a, "F")
                self.run(b, "B")
            else:
                self.overlap(forward=a, backward=b)
            self.overlap(forward=b, backward=a)
        for _ in range(below):
            self.run(b, "B")
            self.overlap(forward=b, backward=a)
        self._finish(below)
        return self.written

    def _finish(self, below: int) -> None:
        """Write the last backwards: whole ones first, then split ones, whose W fill the end."""
        # In pairs bB aB: the first half is whole, the rest split. On an even rank that is between the two of a pair.
        total = 2 * (self.rank + 1)
        split_at = 2 * ((self.rank + 1) // 2) + (self.rank % 2 == 0)
        for index in range(total):
            self.run(self.a if index % 2 else self.b, "I" if index >= split_at else "B")
        for _ in range(below):
            self.weight()
            self.run(self.a, "I")
        while self.queue:
            self.weight()
