"""How far is each rank's clock from that of the first rank?

A collective of all ranks ends on all of them at nearly the same time: the difference is at most its duration. So each
rank notes the time at the end of several collectives. The shortest one counts, and its duration is the error.
"""

from __future__ import annotations

import time

from sternway.pipeline.transport._transport import Transport

TRIES = 5


def clock_offsets(transport: Transport, ranks: int) -> list[float]:
    """The seconds by which each rank's clock is ahead of the first rank's; the same list on all ranks."""
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
