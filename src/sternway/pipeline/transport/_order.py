"""Which edges between ranks does a schedule use, in which order do the messages of a step arrive on each, and what does
a message that arrives say about those that were sent?

The messages from one rank to another on one channel are received in the order in which they are sent: NCCL knows no
other.
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


def edge_of(key: MessageKey, rank_of: tuple[int, ...]) -> RankEdge:
    """The edge on which a message travels."""
    return RankEdge(rank_of[key.source], rank_of[key.target], key.channel, key.is_gradient)


def edges_of(schedule: Schedule, routes: Routes) -> list[RankEdge]:
    """Every edge between two ranks that a schedule uses, in the order in which all ranks open theirs.

    To open an edge takes both of its ranks. Since all follow one order, there is always an edge that can be opened
    next. Edges of ranks 0 and 1, 2 and 3 and so on come first, so that they are opened at the same time.
    """
    rank_of = schedule.stage_ranks()
    sent = (key for rank in range(schedule.ranks) for step in _sent(schedule, rank, routes, True) for key in step)
    found = {edge_of(key, rank_of) for key in sent if rank_of[key.source] != rank_of[key.target]}
    channels = [MAIN, *sorted(routes.skips)]

    def order(edge: RankEdge) -> tuple[int, ...]:
        first, second = sorted((edge.source, edge.target))
        return first % 2, first, second, edge.source, channels.index(edge.channel), edge.is_gradient

    return sorted(found, key=order)


def expected(schedule: Schedule, routes: Routes, training: bool, rank: int) -> dict[RankEdge, list[MessageKey]]:
    """What arrives at a rank in a step, on each edge in the order in which it is sent."""
    rank_of = schedule.stage_ranks()
    found: dict[RankEdge, list[MessageKey]] = {}
    for source in _neighbours(schedule, routes, rank):
        for key in (key for step in _sent(schedule, source, routes, training) for key in step):
            if rank_of[key.target] == rank:
                found.setdefault(edge_of(key, rank_of), []).append(key)
    return found


def answers(schedule: Schedule, routes: Routes, training: bool, rank: int) -> dict[MessageKey, list[MessageKey]]:
    """What a message that arrives at a rank tells it: which of its own messages were there before that was sent."""
    rank_of = schedule.stage_ranks()
    found: dict[MessageKey, list[MessageKey]] = {}
    for other in _neighbours(schedule, routes, rank):
        heard: list[MessageKey] = []
        for step, sent in zip(schedule.actions[other], _sent(schedule, other, routes, training), strict=True):
            actions = [action for action in step.actions if training or action.op == "F"]
            heard += [key for action in actions for key in routes.received(action) if rank_of[key.source] == rank]
            first = next((key for key in sent if rank_of[key.target] == rank), None)
            if first is not None:
                found[first], heard = heard, []
    return found


def _neighbours(schedule: Schedule, routes: Routes, rank: int) -> list[int]:
    """The other ranks that a rank has messages from, or sends some to."""
    rank_of = schedule.stage_ranks()
    stages = {
        other
        for stage in schedule.placement[rank]
        for way in (routes.into, routes.out_of)
        for other in way(stage).values()
    }
    return sorted({rank_of[stage] for stage in stages} - {rank})


def _sent(schedule: Schedule, rank: int, routes: Routes, training: bool) -> list[list[MessageKey]]:
    """The messages that each step of a rank sends, in order."""
    return [
        [key for action in step.actions if training or action.op == "F" for key in routes.sent(action)]
        for step in schedule.actions[rank]
    ]
