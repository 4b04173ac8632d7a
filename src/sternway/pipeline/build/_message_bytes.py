"""The bytes of messages that a rank holds while it computes, on their way to it and from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from sternway.pipeline.build._weigh import StageWeight
from sternway.pipeline.transport._carrier import GlooCarrier
from sternway.pipeline.transport._order import answers, expected
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.schedule import Action, Schedule, Upkeep


def message_bytes(plan: Schedule, rank: int, weights: Sequence[StageWeight]) -> Iterator[tuple[int, int, int]]:
    """For each step of a rank in training, the bytes beside what its actions take and leave.

    They are those of activations that were sent, of other messages, and of memory that is kept for more.

    Messages are asked for ahead. One that was sent is kept until it is known to have arrived; of an activation, that
    counts which its stage does not keep anyway. What a stage passes to another one of its rank is no copy, which the
    F of that would be. Memory that was received into is used again for later messages, once the stage no longer needs
    it: after its backward, or after W, if that needs it. It stays until the end of the step.

    Args:
        plan: the schedule.
        rank: the rank.
        weights: what the stages take; of each, the bytes of what it receives in F, and sends back in I.
    """
    routes, rank_of = Routes(plan.num_stages, {}), plan.stage_ranks()
    queues = [list(keys) for keys in expected(plan, routes, True, rank).values()]
    heard = answers(plan, routes, True, rank)
    kept: dict[MessageKey, int] = {}  # what was sent, by its bytes
    shared: dict[MessageKey, int] = {}  # what one stage has from another, by the bytes that this one keeps, too
    in_use: set[MessageKey] = set()
    most = 0  # that were received into at once

    def size(keys: Iterable[MessageKey]) -> int:
        return sum(weights[max(key.source, key.target)].message for key in keys)

    for step in plan.actions[rank]:
        for key in (key for action in step.actions for key in routes.received(action)):
            for each in heard.get(key, ()):
                kept.pop(each, None)
            if rank_of[key.source] != rank:
                next(queue for queue in queues if key in queue).remove(key)
                in_use.add(key)
            else:
                beyond = kept.pop(key)
                if not key.is_gradient:
                    shared[key] = max(0, size([key]) - beyond)
        if isinstance(step, Upkeep) and step.op == "OFFLOAD":
            _move(step, weights[step.stage], kept, shared)
        ahead = sum(size(islice(queue, GlooCarrier.ahead)) for queue in queues)
        now = ahead + size(in_use)
        most = max(most, now)
        sent = sum(nbytes for key, nbytes in kept.items() if not key.is_gradient)
        yield sent, ahead + sum(kept.values()) - sent - sum(shared.values()), most - now
        in_use = {key for key in in_use if not any(_is_last(action, key, weights) for action in step.actions)}
        for key in (key for action in step.actions for key in routes.sent(action)):
            kept[key] = size([key]) if key.is_gradient else weights[key.source].sent
            if key.is_gradient:
                shared.pop(key.back, None)


def _move(step: Upkeep, weight: StageWeight, kept: dict[MessageKey, int], shared: dict[MessageKey, int]) -> None:
    """A stage no longer keeps what it has sent of a microbatch, since that is offloaded: it stays for others alone."""
    both = weight.moved - weight.freed
    for key in kept:
        if not key.is_gradient and (key.source, key.microbatch) == (step.stage, step.microbatch):
            kept[key] += both
    for key in shared:
        if (key.source, key.microbatch) == (step.stage, step.microbatch):
            shared[key] = max(0, shared[key] - both)


def _is_last(action: Action, key: MessageKey, weights: Sequence[StageWeight]) -> bool:
    """Whether an action is the last one that needs what was received."""
    if (action.stage, action.microbatch) != (key.target, key.microbatch) or action.op == "F":
        return False
    each = weights[action.stage]
    return action.op != "I" or not (each.gradient_waits if key.is_gradient else each.input_waits)
