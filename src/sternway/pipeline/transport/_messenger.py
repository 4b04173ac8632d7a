"""Sends and receives the messages of one rank.

Messages are asked for ahead, in the order in which the sender sends: NCCL needs that, gloo does not mind.

The first time, each activation is preceded by its description (``Spec``). Both sides keep it, and send tensors alone
while the batch has the same shapes. A gradient needs no description: it is like its activation. Descriptions travel
from host to host, over gloo.

So do the tensors themselves in the first step with a batch's shapes, also between GPUs. In that step CUDA loads
kernels, which waits for everything on the GPU, and so for what NCCL has begun to send; two ranks that load at the same
time would wait for each other for ever.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._carrier import Arriving, Carrier
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._order import RankEdge, answers, edge_of, expected
from sternway.pipeline.transport._payload import Payload, Spec
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.pipeline.transport._sends import Sends
from sternway.schedule import Schedule

_SEEN = 64  # batches that are remembered


@dataclass(slots=True)
class _Incoming:
    """What arrives on one edge: what is posted, and then what follows, in order."""

    queue: deque[MessageKey]
    posted: dict[MessageKey, tuple[Spec, Arriving]] = field(default_factory=dict)


class Messenger:
    """The messages of one rank. If ``dynamic``, descriptions are sent every time, because shapes depend on the data."""

    def __init__(self, groups: ProcessGroups, carrier: Carrier, host: Carrier, dynamic: bool) -> None:
        self.awaited: tuple[MessageKey, int] | None = None  # what this rank waits for, and from which rank
        self._groups, self._carrier, self._dynamic = groups, carrier, dynamic
        self._steady, self._host = carrier, host  # which of the two carries this step's tensors
        self._seen: list[tuple[int, bool]] = []  # what was told about batches, once a step has run with them
        self._told: tuple[int, bool] | None = None  # what was told about the batch of the step before
        self._training = False
        self._activations: dict[MessageKey, Spec] = {}  # what is known of them before they come
        self._gradients: dict[MessageKey, Spec] = {}  # of those whose activations were described
        self._local: dict[MessageKey, Payload] = {}  # from a stage of this rank to another one of this rank
        self._describing = Sends(groups)
        self._incoming: dict[RankEdge, _Incoming] = {}
        self._rank_of: tuple[int, ...] = ()
        self._tag: Callable[[MessageKey], int] = lambda key: 0
        self._expected: dict[bool, dict[RankEdge, list[MessageKey]]] = {}  # in training, and in evaluation
        self._answers: dict[bool, dict[MessageKey, list[MessageKey]]] = {}  # likewise
        self._ops: set[str] = set()  # the kinds of actions of the schedules so far

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        """Get ready for the messages of a schedule. All ranks call it together, or before the same step.

        With a new kind of action, the next step is a first one again: it has kernels of its own.
        """
        ops = {action.op for steps in schedule.actions for step in steps for action in step.actions}
        if not ops <= self._ops:
            self._seen.clear()
            self._ops |= ops
        self._rank_of = schedule.stage_ranks()
        self._tag = routes.tag
        rank, both = self._groups.rank, (False, True)
        self._expected = {training: expected(schedule, routes, training, rank) for training in both}
        self._answers = {training: answers(schedule, routes, training, rank) for training in both}
        for carrier in {id(each): each for each in (self._host, self._steady)}.values():
            carrier.connect(schedule, routes)

    def begin(self, batch: int, training: bool) -> None:
        """Get ready for the messages of one step, and post the first receives.

        Args:
            batch: what all ranks were told about the batch's shapes. Descriptions are kept while it stays the same.
            training: whether there will be gradients.
        """
        told, self._training = (batch, training), training
        self._carrier = self._steady if told in self._seen else self._host
        if told != self._told or self._dynamic:
            self._activations.clear()
        # What is described again in this step is not known before it arrives.
        self._gradients = {key: spec for key, spec in self._gradients.items() if key.back in self._activations}
        self._told = told
        self._incoming = {edge: _Incoming(deque(messages)) for edge, messages in self._expected[training].items()}
        self._post()

    def finish(self) -> None:
        """All messages of the step were sent and received."""
        self._describing.finish()
        self._carrier.end_step()
        if self._told is not None and self._told not in self._seen:
            self._seen = [*self._seen[-_SEEN:], self._told]

    def close(self, timeout: float) -> None:
        """Drop what is under way after so many seconds."""
        self._incoming.clear()
        self._local.clear()
        self._describing.drop()
        self._host.drop(timeout)
        self._steady.drop(timeout)

    # Receiving

    def receive(self, key: MessageKey) -> Payload:
        """Wait for a message; on a GPU, let the current stream wait."""
        edge = edge_of(key, self._rank_of)
        if edge.source == self._groups.rank:
            return self._local.pop(key)
        incoming = self._incoming[edge]
        self.awaited = key, edge.source
        while key not in incoming.posted:  # what is sent before it is posted before it
            self._start_receive(incoming, edge.source)
        spec, arriving = incoming.posted.pop(key)
        arriving.wait()
        self.awaited = None
        for sent in self._answers[self._training].get(key, ()):
            self._carrier.answered(sent)
        self._post()
        return spec, [each.in_order(tensor) for each, tensor in zip(spec.tensors, arriving.tensors, strict=True)]

    def _post(self) -> None:
        for edge, incoming in self._incoming.items():
            while (
                incoming.queue
                and len(incoming.posted) < self._carrier.ahead
                and self._known_spec(incoming.queue[0]) is not None
            ):
                self._start_receive(incoming, edge.source)

    def _known_spec(self, key: MessageKey) -> Spec | None:
        """What a message looks like, if that is known before it comes."""
        return (self._gradients if key.is_gradient else self._activations).get(key)

    def _learn(self, key: MessageKey, spec: Spec) -> None:
        """An activation was described. If it cannot vary, it comes without that from now on."""
        self._gradients[key.back] = spec.gradients()
        if not spec.varies:
            self._activations[key] = spec

    def _start_receive(self, incoming: _Incoming, source: int) -> None:
        key = incoming.queue.popleft()
        spec = self._known_spec(key) or self._receive_spec(key, source)
        incoming.posted[key] = spec, self._carrier.receive(key, spec, source)

    def _receive_spec(self, key: MessageKey, source: int) -> Spec:
        size = torch.empty(1, dtype=torch.int64)
        self._groups.attempt(self._describe(dist.irecv, size, key, source).wait)
        text = torch.empty(int(size.item()), dtype=torch.uint8)
        self._groups.attempt(self._describe(dist.irecv, text, key, source).wait)
        spec: Spec = pickle.loads(text.numpy().tobytes())
        self._learn(key, spec)
        return spec

    # Sending

    def send(self, key: MessageKey, payload: Payload) -> None:
        """Start to send a message."""
        spec, tensors = payload
        target = self._rank_of[key.target]
        if target == self._groups.rank:
            self._local[key] = payload
            return
        known = self._known_spec(key)
        if not key.is_gradient:
            if known is None:
                self._send_spec(key, spec, target)
            elif known != spec:
                raise _unlike(key, spec, known)
        described = (known or spec).tensors
        sent = [each.in_memory(tensor) for each, tensor in zip(described, tensors, strict=True)]
        self._carrier.send(key, sent, target)

    def _send_spec(self, key: MessageKey, spec: Spec, target: int) -> None:
        text = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8)
        for tensor in (torch.tensor([text.numel()], dtype=torch.int64), text):
            self._describing.add(self._describe(dist.isend, tensor, key, target), tensor)
        self._learn(key, spec)

    def _describe(self, call: Any, tensor: Tensor, key: MessageKey, other: int) -> Any:
        members, group = self._groups.members, self._groups.activations
        return self._groups.attempt(call, tensor, members[other], group=group, tag=self._tag(key))


def _unlike(key: MessageKey, spec: Spec, known: Spec) -> PipelineError:
    """The error about a message that is not like that of the step before, whose description the receiver has."""
    what = f"stage {key.source}'s output for microbatch {key.microbatch} must"
    if spec.shapes() != known.shapes():
        return PipelineError(
            f"{what} have the shapes of the step before, as the batch has",
            got=f"{spec.shapes()}, not {known.shapes()}",
            fix="pass dynamic=True, if the shapes of outputs depend on the data",
        )
    if spec.tensors != known.tensors:
        return PipelineError(
            f"{what} have the dtypes of the step before, and need gradients as there",
            got=f"{spec.kinds()}, not {known.kinds()}",
            fix="freeze and thaw parameters of the model on every rank; or pass dynamic=True",
        )
    return PipelineError(
        f"{what} have the values that are no tensors of the step before, and come by the same way",
        got="others, or another way through the forward",
        fix="pass dynamic=True, if they depend on the data, or on what this rank alone has frozen or thawed",
    )
