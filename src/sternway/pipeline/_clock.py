"""Every rank has a clock of its own. How far is each from the first rank's?

A gathering of all ranks ends for all at nearly the same instant: no later, on any rank, than it took. So each notes the
time at its end; of several gatherings the shortest counts, and its length is the error.
"""

from __future__ import annotations

import time

from sternway.pipeline._transport import Transport

TRIES = 5


def offsets(transport: Transport, ranks: int) -> list[float]:
    """Seconds by which each rank's clock is ahead of the first rank's, known to all ranks."""
    if not transport.mine:  # one process, one clock
        return [0.0] * ranks
    ends: list[tuple[float, list[float]]] = []
    for _ in range(TRIES):
        start = time.perf_counter()
        transport.gather([[0.0]])
        end = time.perf_counter()
        rows = transport.gather([[end, end - start]])
        ends.append((max(row[1] for row in rows), [row[0] for row in rows]))
    _, clocks = min(ends)
    return [clock - clocks[0] for clock in clocks]
