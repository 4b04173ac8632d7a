"""In which order do the messages of a step reach a rank, and how early may it ask for each?

The messages from one rank to another on one channel are received in the order in which they are sent: NCCL knows no
other. A receive that is posted early occupies a part of a GPU until its message is there, so only the next few are.
If a message could only be sent after something that this rank has not sent yet, the rank would wait for itself as soon
as anything it does waits for the GPU, as loading a kernel or freeing memory may. So each message comes with the number
of messages that this rank must have sent before.
"""

from __future__ import annotations

from dataclasses import dataclass

from sternway.pipeline.transport._routes import MAIN, MessageKey, Routes
from sternway.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RankEdge:
    """A way from one rank to another: messages of one channel, in one direction."""

    source: int
    target: int
    channel: str
    is_gradient: bool

    def __str__(self) -> str:
        return f"{'gradient' if self.is_gradient else 'activation'}/{self.channel}/{self.source}-{self.target}"


@dataclass(frozen=True, slots=True)
class Expected:
    """A message that this rank receives.

    Attributes:
        after: how many messages this rank must have sent before the other rank can send this one.
        turn: how many messages this rank needs before this one.
    """

    key: MessageKey
    after: int
    turn: int


def edge_of(key: MessageKey, rank_of: tuple[int, ...]) -> RankEdge:
    """The edge on which a message travels."""
    return RankEdge(rank_of[key.source], rank_of[key.target], key.channel, key.is_gradient)


def edges_of(schedule: Schedule, routes: Routes) -> list[RankEdge]:
    """Every edge between two ranks that a schedule uses, in the order in which all ranks open theirs.

    To open an edge takes both of its ranks. Since all follow one order, there is always an edge that can be opened
    next. Edges of ranks 0 and 1, 2 and 3 and so on come first, so that they are opened at the same time.
    """
    rank_of = schedule.stage_ranks()
    sent = (key for keys in _sent(schedule, routes, True) for step in keys for key in step)
    found = {edge_of(key, rank_of) for key in sent if rank_of[key.source] != rank_of[key.target]}
    channels = [MAIN, *sorted(routes.skips)]

    def order(edge: RankEdge) -> tuple[int, ...]:
        first, second = sorted((edge.source, edge.target))
        return first % 2, first, second, edge.source, channels.index(edge.channel), edge.is_gradient

    return sorted(found, key=order)


def expected(schedule: Schedule, routes: Routes, training: bool, rank: int) -> dict[RankEdge, list[Expected]]:
    """What arrives at a rank in a step, on each edge in the order in which it is sent."""
    rank_of = schedule.stage_ranks()
    sent = _sent(schedule, routes, training)
    received = [
        [
            [key for action in step.actions if training or action.op == "F" for key in routes.received(action)]
            for step in steps
        ]
        for steps in schedule.actions
    ]
    needed = (key for step in received[rank] for key in step if rank_of[key.source] != rank)
    turns = {key: turn for turn, key in enumerate(needed)}
    found: dict[RankEdge, list[Expected]] = {}
    past: dict[MessageKey, int] = {}  # how many messages of ``rank`` each message depends on
    seen = [0] * schedule.ranks  # how many messages of ``rank`` each rank's actions so far depend on
    place = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for here in range(schedule.ranks):
            while place[here] < len(sent[here]) and all(key in past for key in received[here][place[here]]):
                moved = True
                seen[here] = max([seen[here], *(past[key] for key in received[here][place[here]])])
                for key in sent[here][place[here]]:
                    there = rank_of[key.target]
                    if there == rank != here:
                        found.setdefault(edge_of(key, rank_of), []).append(Expected(key, seen[here], turns[key]))
                    seen[here] += here == rank != there
                    past[key] = seen[here]
                place[here] += 1
    return found


def _sent(schedule: Schedule, routes: Routes, training: bool) -> list[list[list[MessageKey]]]:
    """The messages that each step of each rank sends, in order."""
    return [
        [
            [key for action in step.actions if training or action.op == "F" for key in routes.sent(action)]
            for step in steps
        ]
        for steps in schedule.actions
    ]
