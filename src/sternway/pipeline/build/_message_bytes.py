"""The bytes of messages that a rank holds while it computes, on their way to it and from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sternway.pipeline.build._weigh import StageWeight
from sternway.pipeline.transport._carrier import GlooCarrier
from sternway.pipeline.transport._herald import NOTICE_BYTES, line_of
from sternway.pipeline.transport._order import answers, expected
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.schedule import Action, Schedule, Upkeep


def message_bytes(
    plan: Schedule, rank: int, weights: Sequence[StageWeight], gpus: bool = False
) -> Iterator[tuple[int, int, int]]:
    """For each step of a rank in training, the bytes beside what its actions take and leave.

    They are those of activations that were sent, of other messages, and of memory that is kept for more.

    Args:
        plan: the schedule.
        rank: the rank.
        weights: what the stages take; of each, the bytes of what it receives in F, and sends back in I.
        gpus: whether messages travel between GPUs.
    """
    return (_between_gpus if gpus else _between_cpus)(plan, rank, weights)


def _between_gpus(plan: Schedule, rank: int, weights: Sequence[StageWeight]) -> Iterator[tuple[int, int, int]]:
    """Over NCCL. Memory for a message is taken when it is made, and given back when it has arrived.

    So a message is there twice: on the receiving rank in the step that it is for, and on the sending one in the step
    after that which made it, while it travels. What comes earlier than it is needed is not counted, since that depends
    on how fast the ranks are.
    """
    routes, rank_of = Routes(plan.num_stages, {}), plan.stage_ranks()
    passed: dict[MessageKey, int] = {}  # from one stage of the rank to another, by their bytes
    shared: dict[MessageKey, int] = {}  # of these, what both stages keep
    sent = 0  # bytes that travel while the step runs

    def size(key: MessageKey) -> int:
        return weights[max(key.source, key.target)].message

    for step in plan.actions[rank]:
        arriving = 0
        for key in (key for action in step.actions for key in routes.received(action)):
            if rank_of[key.source] != rank:
                arriving += size(key)
            elif key.is_gradient:
                passed.pop(key)
            else:
                shared[key] = max(0, size(key) - passed.pop(key))
        if isinstance(step, Upkeep) and step.op == "OFFLOAD":
            _move(step, weights[step.stage], passed, shared)
        yield sent + sum(passed.values()), arriving - sum(shared.values()), 0
        sent = 0
        for key in (key for action in step.actions for key in routes.sent(action)):
            taken = size(key) if key.is_gradient else weights[key.source].sent
            if rank_of[key.target] == rank:
                passed[key] = taken
            else:
                sent += taken
            if key.is_gradient:
                shared.pop(key.back, None)


def _between_cpus(plan: Schedule, rank: int, weights: Sequence[StageWeight]) -> Iterator[tuple[int, int, int]]:
    """Over gloo.

    Messages are asked for ahead. One that was sent is kept until it is known to have arrived; of an activation, that
    counts which its stage does not keep anyway. What a stage passes to another one of its rank is no copy, which the
    F of that would be. Memory that was received into is used again for later messages, once the stage no longer needs
    it: after its backward, or after W, if that needs it. It stays until the end of the step, as does what the rank has
    told the next one about it.
    """
    routes, rank_of = Routes(plan.num_stages, {}), plan.stage_ranks()
    edges = expected(plan, routes, True, rank).values()
    queue_of = {key: queue for queue in map(list, edges) for key in queue}
    queues = list({id(queue): queue for queue in queue_of.values()}.values())
    heard = answers(plan, routes, True, rank)
    sent: dict[MessageKey, int] = {}  # activations that are on their way, by their bytes
    returned: dict[MessageKey, int] = {}  # gradients, likewise
    shared: dict[MessageKey, int] = {}  # what one stage has from another, by the bytes that this one keeps, too
    in_use: dict[tuple[int, int], dict[MessageKey, int]] = {}  # what was received, for each stage and microbatch
    used = most = 0  # the bytes that are received into, and the most of them at once
    told = 0 if rank == line_of(plan)[-1] else NOTICE_BYTES

    def size(key: MessageKey) -> int:
        return weights[max(key.source, key.target)].message

    for step in plan.actions[rank]:
        for key in (key for action in step.actions for key in routes.received(action)):
            for each in heard.get(key, ()):
                (returned if each.is_gradient else sent).pop(each, None)
            if rank_of[key.source] != rank:
                queue_of[key].remove(key)  # nearly always its first
                in_use.setdefault((key.target, key.microbatch), {})[key] = size(key)
                used += size(key)
            elif key.is_gradient:
                returned.pop(key)
            else:
                shared[key] = max(0, size(key) - sent.pop(key))
        if isinstance(step, Upkeep) and step.op == "OFFLOAD":
            _move(step, weights[step.stage], sent, shared)
        ahead = sum(size(key) for queue in queues for key in queue[: GlooCarrier.ahead])
        most = max(most, ahead + used)
        others = told + ahead + sum(returned.values()) - sum(shared.values())
        yield sum(sent.values()), others, most - ahead - used
        for action in step.actions:
            held = in_use.get((action.stage, action.microbatch), {})
            used -= sum(held.pop(key) for key in list(held) if _is_last(action, key, weights[action.stage]))
            for key in routes.sent(action):
                if key.is_gradient:
                    returned[key] = size(key)
                    shared.pop(key.back, None)
                else:
                    sent[key] = weights[key.source].sent


def _move(step: Upkeep, weight: StageWeight, sent: dict[MessageKey, int], shared: dict[MessageKey, int]) -> None:
    """A stage no longer keeps what it has sent of a microbatch, since that is offloaded: it stays for others alone."""
    both = weight.moved - weight.freed
    for key in sent:
        if (key.source, key.microbatch) == (step.stage, step.microbatch):
            sent[key] += both
    for key in shared:
        if (key.source, key.microbatch) == (step.stage, step.microbatch):
            shared[key] = max(0, shared[key] - both)


def _is_last(action: Action, key: MessageKey, weight: StageWeight) -> bool:
    """Whether an action of the stage that received something is the last one that needs it."""
    if action.op == "I":
        return not (weight.gradient_waits if key.is_gradient else weight.input_waits)
    return action.op != "F"
