"""The bytes of messages that a rank holds while it computes, on their way to it and from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from sternway.pipeline.build._weigh import StageWeight
from sternway.pipeline.transport._carrier import GlooCarrier
from sternway.pipeline.transport._order import answers, expected
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.schedule import Action, Schedule


def message_bytes(plan: Schedule, rank: int, weights: Sequence[StageWeight]) -> Iterator[tuple[int, int]]:
    """For each step of a rank in training, the bytes beside what its actions take and leave, and those kept for more.

    Messages are asked for ahead. A gradient that was sent is kept until it is known to have arrived; an activation is
    kept for its backward anyway. What a stage passes to another one of its rank is no copy, which its F would be.
    Memory that was received into is used again for later messages, once the stage no longer needs it: after its
    backward, or after W, if that needs it. It stays until the end of the step.

    Args:
        plan: the schedule.
        rank: the rank.
        weights: what the stages take; of each, the bytes of what it receives in F, and sends back in I.
    """
    routes, rank_of = Routes(plan.num_stages, {}), plan.stage_ranks()
    queues = [list(keys) for keys in expected(plan, routes, True, rank).values()]
    heard = answers(plan, routes, True, rank)
    kept: set[MessageKey] = set()
    shared: set[MessageKey] = set()
    in_use: set[MessageKey] = set()
    most = 0  # that were received into at once

    def size(keys: Iterator[MessageKey]) -> int:
        return sum(weights[max(key.source, key.target)].message for key in keys)

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
        in_use = {key for key in in_use if not any(_is_last(action, key, weights) for action in step.actions)}
        for key in (key for action in step.actions for key in routes.sent(action) if key.is_gradient):
            kept.add(key)
            shared.discard(key.back)


def _is_last(action: Action, key: MessageKey, weights: Sequence[StageWeight]) -> bool:
    """Whether an action is the last one that needs what was received."""
    if (action.stage, action.microbatch) != (key.target, key.microbatch) or action.op == "F":
        return False
    each = weights[action.stage]
    return action.op != "I" or not (each.gradient_waits if key.is_gradient else each.input_waits)
