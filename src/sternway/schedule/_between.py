"""What passes between the actions of measured steps: the time of messages, and what each action takes a rank besides.

rank 0   |── F ──|
rank 1   |─ W ─|       |── F ──|       [1] it waited: from the end on rank 0, a message, and to take it
rank 1   |───── W ─────|·|── F ──|     [2] the message was there before W ended: to take it, alone

A message that is sent soon after another one on the same way may have waited for that (``Costs.comm_busy``). So several
shares are tried: with the right one, what messages take besides these waits is most alike.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from sternway.schedule._costs import EPSILON
from sternway.schedule._depends import KIND
from sternway.schedule._timeline import Timeline

_MANY = 25_000  # actions: of steps that have more together, some are looked at, since it is the training that waits
_SURELY = 1.5  # of a message's time, after which it was there: some take longer than most
_TELLING = 3  # messages that were waited for, from which a median tells something
_SHARES = tuple(eighth / 8 for eighth in range(9))  # of a message's time, that it may keep its way busy
_BETTER = 0.9  # of what is unexplained with the planned share, that another one must be below
_ENOUGH = 2000  # messages, to find that share
_IDLE = 0.1  # of a message's time: a rank that was idle for longer has waited for one

Edge = tuple[int, int]
"""From which rank to which."""


class _Message(NamedTuple):
    """When it was sent, and which action needed it: when that began, and how long its rank had been idle by then.

    A rank that was free before the message was sent has waited for it, unless it needed several, of which any may have
    come last.
    """

    edge: Edge
    sent: float
    action: int
    start: float
    idle: float
    is_alone: bool

    @property
    def is_waited_for(self) -> bool:
        return self.is_alone and self.start - self.idle <= self.sent


class _Start(NamedTuple):
    """When an action began, when its rank was free, and when what it needs from other ranks was computed there."""

    start: float
    free: float
    needs: tuple[tuple[Edge, float], ...]
    after_action: bool  # and not after upkeep, which it may have waited for


@dataclass(frozen=True, slots=True)
class Between:
    """What passes between actions, as ``Costs`` has it; ``comm`` is one number if all are alike."""

    comm: float | list[list[float]]
    comm_busy: float
    overhead: float
    receive: float


def between_actions(runs: Sequence[Timeline], planned: Sequence[Sequence[float]], busy: float) -> Between:
    """Return the times of messages, for each pair of ranks or one number if they are alike, and an action's overhead.

    The time of a message is the median of those for which a rank waited. Where none waited, it is no longer than the
    shortest time that it can have taken. Between ranks that had no messages, or too few to tell, it is that of all.

    Args:
        runs: measured steps.
        planned: what messages were planned to take, from each rank to each: the most, where no rank waited.
        busy: the planned share of that in which a message kept its way busy, where nothing tells.
    """
    runs = runs[:: 1 + sum(len(rank) for run in runs for rank in run.events) // _MANY]
    starts = [list(_starts(run)) for run in runs]
    sent, most = [_messages(each) for each in starts], max(map(max, planned))
    found = _times(chain(*(_departures(run, {}, 0.0) for run in sent)), len(planned), most)
    if busy or _follow_closely(sent, found):
        for _ in range(2):  # the first time, what messages wait for each other is in what they take
            busy = _share(sent, found, busy, most)
            found = _times(chain(*(_departures(run, found, busy) for run in sent)), len(planned), most)
    gaps: tuple[list[float], list[float]] = [], []  # before actions without messages, and with some that had come
    for actions, run in zip(starts, sent, strict=True):
        there: dict[int, float] = defaultdict(float)
        for message, begin in _departures(run, found, busy):
            # A message that waits for others comes when they have come: nobody knows that as surely.
            arrival = begin + _SURELY * found[message.edge] if begin == message.sent else math.inf
            there[message.action] = max(there[message.action], arrival)
        for number, each in enumerate(actions):
            if each.after_action and there[number] <= each.free:
                gaps[bool(each.needs)].append(each.start - each.free)
    begins, takes = gaps
    # The lower quartile, since behind a full way some of the others have waited without a trace of it.
    took = sorted(takes)[len(takes) // 4] if takes else 0.0
    overhead = max(0.0, capped_mean(begins)) if begins else took
    receive = max(0.0, took - overhead)
    ranks, besides = range(len(planned)), overhead + receive
    rows = [[max(0.0, found[a, b] - besides) if a != b else 0.0 for b in ranks] for a in ranks]
    times = [rows[a][b] for a in ranks for b in ranks if a != b] or [max(0.0, found[0, 0] - besides)]
    alike = max(times) - min(times) <= EPSILON * max(times)
    return Between(times[0] if alike else rows, busy, overhead, receive)


def _messages(starts: Sequence[_Start]) -> list[_Message]:
    """Return the messages of a run, in the order in which they were sent."""
    found = [
        _Message(edge, end, number, each.start, each.start - each.free, len(each.needs) == 1)
        for number, each in enumerate(starts)
        for edge, end in each.needs
    ]
    return sorted(found, key=lambda message: message.sent)


def _departures(run: Sequence[_Message], times: Mapping[Edge, float], busy: float) -> Iterator[tuple[_Message, float]]:
    """Return when each message set out, if each of those before it kept its way busy for a share of its time."""
    free: dict[Edge, float] = {}
    for message in run:
        begin = max(message.sent, free.get(message.edge, message.sent))
        free[message.edge] = begin + busy * times.get(message.edge, 0.0)
        yield message, begin


def _times(departures: Iterable[tuple[_Message, float]], ranks: int, most: float) -> dict[Edge, float]:
    """Return the time of a message from each rank to each, besides waiting for others."""
    waited, passed = defaultdict[Edge, list[float]](list), defaultdict[Edge, list[float]](list)
    for message, begin in departures:
        if message.is_waited_for:
            waited[message.edge].append(max(0.0, message.start - begin))
        else:  # when it set out is known less surely than when it was sent, and the shortest counts
            passed[message.edge].append(max(0.0, message.start - message.sent))
    everywhere = [time for times in waited.values() for time in times]
    shortest = [time for times in passed.values() for time in times]
    usual = statistics.median(everywhere) if everywhere else min([most, *shortest])

    def between(edge: Edge) -> float:
        enough = len(waited[edge]) >= _TELLING
        return statistics.median(waited[edge]) if enough else min([usual, *passed[edge]])

    return {(a, b): between((a, b)) for a in range(ranks) for b in range(ranks)}


def _follow_closely(sent: Sequence[Sequence[_Message]], times: Mapping[Edge, float]) -> bool:
    """Return whether a message was sent while another one was on the same way."""
    for run in sent:
        last: dict[Edge, float] = {}
        for message in run:
            if message.sent < last.get(message.edge, -math.inf) + times[message.edge]:
                return True
            last[message.edge] = message.sent
    return False


def _share(sent: Sequence[Sequence[_Message]], times: Mapping[Edge, float], planned: float, most: float) -> float:
    """Return the share of its time for which a message keeps its way busy: with it, their times are most alike."""
    idle, some, left = _IDLE * statistics.median(times.values()), list[Sequence[_Message]](), _ENOUGH
    for run in sent:
        if left > 0:
            some.append(run[:left])  # which those after it do not delay
            left -= len(run)
    ranks = 1 + max(b for _, b in times)

    def unexplained(share: float) -> float:
        departures = [list(_departures(run, times, share)) for run in some]
        usual, total = _times(chain(*departures), ranks, most), 0.0
        for run in departures:
            arrived: dict[int, tuple[_Message, float]] = {}  # the last of what an action needed
            for message, begin in run:
                there = begin + usual[message.edge]
                if message.action not in arrived or arrived[message.action][1] < there:
                    arrived[message.action] = message, there
            late = [(there - message.start, message.idle > idle) for message, there in arrived.values()]
            total += sum(abs(by) if is_idle else max(0.0, by) for by, is_idle in late)
        return total

    best = min(_SHARES, key=unexplained)
    return best if unexplained(best) < _BETTER * unexplained(planned) else planned


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
            for action in event.action.actions:
                if action.op != "W":
                    source = action.stage + (-1 if action.op == "F" else 1)
                    made = ended.get((KIND[action.op], source, action.microbatch))
                    if made is not None and made[0] != rank:
                        needs.append(((made[0], rank), made[1]))
            if event.action.actions:
                yield _Start(event.start, free, tuple(needs), after_action)
            free, after_action = event.end, bool(event.action.actions)
