"""DualPipe: two copies of the model, one placed down the ranks and one up, so that both ends of the pipeline have work.

Stages 0 to p - 1 are the model, stage s on rank s. Stages p to 2 p - 1 are the same layers again, placed from the last
rank to the first. So rank r holds stages r and 2 p - 1 - r, as in ZB-V, but stage p does not go on where stage p - 1
ends: it begins with the second half of the microbatches. Every rank holds twice the parameters, and the gradients of
both copies are to be added up after the step.

                  rank 0   rank 1   rank 2   rank 3
    stages          0  ───▶  1  ───▶  2  ───▶  3         the first m / 2 microbatches
                    7  ◀───  6  ◀───  5  ◀───  4         the others; stage 4 is a copy of stage 0, 7 of 3

Ranks r and p - 1 - r do the same, with the copies exchanged: each half of the ranks runs the order of DualPipeV on
p / 2 ranks. A rank keeps at most p + 1 microbatches. If F&B is the time of an overlapped pair (``Costs.overlap``),
F = I >= W and F&B >= B, a rank in the middle is idle for (p/2 - 1) (F&B + B - 3 W). Ranks farther out have fewer pairs,
and less idle time by what those would save.

Paper: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, section 3.2.1 and table 2. It needs an even number of ranks, and an
even number of microbatches that is at least 2 p.

2 ranks, 4 microbatches, F = I = W:

    rank 0 |F0- F'2 F1- B'2---- +'3-------- B'3---- I1- W1- |
    rank 1 |F'2 F0- F'3 B0----- +1--------- B1----- I'3 W'3 |
"""

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap
from sternway.schedule._costs import Placement
from sternway.schedule.named._dualpipe_v import RankWriter


def dualpipe(placement: Placement, microbatches: int) -> list[list[Action | Overlap]]:
    """Return each rank's actions: those of dualpipe-v on half as many ranks, one after the other and back again.

    Raises:
        ScheduleError: an odd number of ranks or microbatches, or fewer than 2 * ranks microbatches.
    """
    ranks = len(placement)
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise ScheduleError(
            "dualpipe needs an even number of ranks, and an even number of microbatches, at least two per rank",
            got=f"{ranks} ranks, {microbatches} microbatches",
            fix="use dualpipe-v, which takes any number of ranks, or zb-v, which takes any number of both",
        )
    half, rows = microbatches // 2, []
    for rank, (down, up) in enumerate(placement):
        from_end = ranks - 1 - rank
        a, b = (down, up) if rank < from_end else (up, down)  # a is of the copy that begins at the nearer end
        writer = RankWriter(min(rank, from_end), ranks // 2, a, b, begins={up: half})
        rows.append(writer.steps(half))
    return rows
