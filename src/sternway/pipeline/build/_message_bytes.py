"""The bytes of messages that a rank holds while it computes, on their way to it and from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from sternway.pipeline.transport._carrier import GlooCarrier
from sternway.pipeline.transport._order import answers, expected
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.schedule import Schedule


def message_bytes(plan: Schedule, rank: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each step of a rank in training, the bytes beside what its actions take and leave, and those kept for more.

    Messages are asked for ahead. A gradient that was sent is kept until it is known to have arrived; an activation is
    kept for its backward anyway. What a stage passes to another one of its rank is no copy, which its F would be.
    Memory that was received into is used again for later messages, and stays until the end of the step.

    Args:
        plan: the schedule.
        rank: the rank.
        sizes: the bytes of what each stage receives in F, and sends back in I.
    """
    routes, rank_of = Routes(plan.num_stages, {}), plan.stage_ranks()
    queues = [list(keys) for keys in expected(plan, routes, True, rank).values()]
    heard = answers(plan, routes, True, rank)
    kept: set[MessageKey] = set()
    shared: set[MessageKey] = set()
    in_use: set[MessageKey] = set()
    most = 0  # that were received into at once

    def size(keys: Iterator[MessageKey]) -> int:
        return sum(sizes[max(key.source, key.target)] for key in keys)

    for step in plan.actions[rank]:
        for key in (key for action in step.actions for key in routes.received(action)):
            kept.difference_update(heard.get(key, ()))
            if rank_of[key.source] != rank:
                next(queue for queue in queues if key in queue).remove(key)
                in_use.add(key)
            elif key.is_gradient:
                kept.remove(key)
            else:
                shared.add(key)
        ahead = sum(size(islice(queue, GlooCarrier.ahead)) for queue in queues)
        now = ahead + size(iter(in_use))
        most = max(most, now)
        yield ahead + size(iter(kept)) - size(iter(shared)), most - now
        turned = {(action.stage, action.microbatch) for action in step.actions if action.is_backward}
        in_use = {key for key in in_use if (key.target, key.microbatch) not in turned}
        for key in (key for action in step.actions for key in routes.sent(action) if key.is_gradient):
            kept.add(key)
            shared.discard(key.back)
