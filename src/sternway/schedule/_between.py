"""What passes between the actions of measured steps: the time of messages, and what each action takes a rank besides.

rank 0   |── F ──|
rank 1   |─ W ─|       |── F ──|       [1] it waited: from the end on rank 0, a message and the overhead of F
rank 1   |───── W ─────|·|── F ──|     [2] the message was there before W ended: the overhead of F alone
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sternway.schedule._costs import EPSILON
from sternway.schedule._depends import KIND
from sternway.schedule._timeline import Timeline

_TELLING = 3  # messages that were waited for, from which a median tells something

Edge = tuple[int, int]
"""From which rank to which."""


@dataclass(frozen=True, slots=True)
class _Start:
    """When an action began, when its rank was free, and when what it needs from other ranks was computed there."""

    start: float
    free: float
    needs: tuple[tuple[Edge, float], ...]
    after_action: bool  # and not after upkeep, which it may have waited for


def between_actions(
    runs: Sequence[Timeline], planned: Sequence[Sequence[float]]
) -> tuple[float | list[list[float]], float]:
    """Return the times of messages, for each pair of ranks or one number if they are alike, and an action's overhead.

    The time of a message is the median of those for which a rank waited. Where none waited, it is no longer than the
    shortest time that it can have taken. Between ranks that had no messages, or too few to tell, it is that of all.

    Args:
        runs: measured steps.
        planned: what messages were planned to take, from each rank to each: the most, where no rank waited.
    """
    starts = [start for run in runs for start in _starts(run)]
    waited, passed = defaultdict[Edge, list[float]](list), defaultdict[Edge, list[float]](list)
    for each in starts:
        for edge, end in each.needs:
            (waited if each.free <= end else passed)[edge].append(max(0.0, each.start - end))
    everywhere = [time for times in waited.values() for time in times]
    shortest = [time for times in passed.values() for time in times]
    usual = statistics.median(everywhere) if everywhere else min([max(map(max, planned)), *shortest])

    def between(edge: Edge) -> float:
        enough = len(waited[edge]) >= _TELLING
        return statistics.median(waited[edge]) if enough else min([usual, *passed[edge]])

    ranks = range(len(planned))
    found = [[0.0 if a == b else between((a, b)) for b in ranks] for a in ranks]
    gaps = [
        each.start - each.free
        for each in starts
        if each.after_action and all(end + found[a][b] <= each.free for (a, b), end in each.needs)
    ]
    overhead = max(0.0, capped_mean(gaps)) if gaps else 0.0
    times = [max(0.0, found[a][b] - overhead) for a in ranks for b in ranks if a != b]
    if not times or max(times) - min(times) <= EPSILON * max(times):
        return max(0.0, usual - overhead), overhead
    return [[max(0.0, time - overhead) for time in row] for row in found], overhead


def capped_mean(values: Sequence[float]) -> float:
    """Return the mean, in which what is more than twice as much as most counts as twice as much."""
    most = 2 * statistics.median(values)
    return statistics.fmean(min(value, most) for value in values)


def _starts(run: Timeline) -> Iterator[_Start]:
    """The start of every action."""
    ended: dict[tuple[int, int, int], tuple[int, float]] = {}
    for rank, events in enumerate(run.events):
        for event in events:
            for action in event.action.actions:
                ended[KIND[action.op], action.stage, action.microbatch] = rank, event.end
    for rank, events in enumerate(run.events):
        free, after_action = 0.0, False
        for event in events:
            needs = []
            for action in (action for action in event.action.actions if action.op != "W"):
                source = action.stage + (-1 if action.op == "F" else 1)
                maker, end = ended.get((KIND[action.op], source, action.microbatch), (rank, 0.0))
                if maker != rank:
                    needs.append(((maker, rank), end))
            if event.action.actions:
                yield _Start(event.start, free, tuple(needs), after_action)
            free, after_action = event.end, bool(event.action.actions)
