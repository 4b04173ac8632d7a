"""Sends and receives the messages of one rank, over torch.distributed.

Activations and gradients have a process group each. Sends are asynchronous, and their tensors are kept until they are
done. Receives are posted ahead, in the order in which the sender sends: NCCL needs that, gloo does not mind.

The first time, each activation is preceded by its description (``Spec``). Both sides keep it, and send tensors alone
while the batch has the same shapes. A gradient needs no description: it is like its activation.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._buffers import Buffers
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._payload import Payload, Spec
from sternway.pipeline.transport._routes import MAIN, MessageKey, Routes
from sternway.schedule import Schedule

AHEAD = 2
"""How many receives are posted before they are needed, from each rank in each direction."""


@dataclass(slots=True)
class _Posted:
    works: list[Any]
    spec: Spec
    buffers: list[Tensor]


@dataclass(slots=True)
class _Incoming:
    """What one other rank sends to this one in one direction: what is posted, and then what follows, in order."""

    source: int
    posted: dict[MessageKey, _Posted] = field(default_factory=dict)
    queue: deque[MessageKey] = field(default_factory=deque)


class Messenger:
    """The messages of one rank. If ``dynamic``, descriptions are sent every time, because shapes depend on the data."""

    def __init__(self, groups: ProcessGroups, dynamic: bool) -> None:
        self.awaited: tuple[MessageKey, int] | None = None  # what this rank waits for, and from which rank
        self._groups, self._dynamic = groups, dynamic
        self._batch: Any = None  # what all ranks said about the batch before this step
        self._keep_specs = False  # whether this step's activations come without descriptions
        self._specs: dict[MessageKey, Spec] = {}
        self._buffers = Buffers(groups.device)
        self._local: dict[MessageKey, Payload] = {}  # from a stage of this rank to another one of this rank
        self._sending: dict[MessageKey, list[tuple[Any, Tensor]]] = {}  # works, and the tensors they read
        self._incoming: dict[tuple[int, bool], _Incoming] = {}
        self._rank_of: tuple[int, ...] = ()
        self._channels: dict[str, int] = {}

    def begin_batch(self, batch: Any) -> None:
        """Given what all ranks said about the batch: descriptions are kept while that stays the same."""
        self._keep_specs = batch == self._batch and not self._dynamic
        if batch != self._batch:
            self._specs.clear()
        self._batch = batch

    def begin(self, schedule: Schedule, routes: Routes, training: bool) -> None:
        """Get ready for the messages of one step, and post the first receives."""
        self._rank_of = schedule.stage_ranks()
        self._channels = {name: number for number, name in enumerate([MAIN, *sorted(routes.skips)])}
        self._incoming = _incoming(schedule, routes, training, self._groups.rank)
        # What is described again in this step is not known before it arrives.
        self._specs = {key: spec for key, spec in self._specs.items() if self._keep_specs and not spec.varies}
        self._post()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for key in list(self._sending):
            self._finish_sending(key)
        self._buffers.clear()

    def close(self) -> None:
        """Drop what is under way."""
        for under_way in (self._sending, self._incoming, self._local):
            under_way.clear()

    # Receiving

    def receive(self, key: MessageKey) -> Payload:
        """Wait for a message."""
        source = self._rank_of[key.source]
        if source == self._groups.rank:
            return self._local.pop(key)
        incoming = self._incoming[source, key.is_gradient]
        self.awaited = key, source
        if key not in incoming.posted:
            incoming.queue.remove(key)
            self._start_receive(key, self._known_spec(key) or self._receive_spec(key, source), incoming)
        for work in incoming.posted[key].works:
            self._groups.attempt(work.wait)
        self.awaited = None
        arrived = incoming.posted.pop(key)
        self._finish_sending(key.back)  # this answers it, so it has arrived
        self._post()
        return arrived.spec, arrived.buffers

    def _post(self) -> None:
        for incoming in self._incoming.values():
            while incoming.queue and len(incoming.posted) < AHEAD:
                spec = self._known_spec(incoming.queue[0])
                if spec is None:
                    break
                self._start_receive(incoming.queue.popleft(), spec, incoming)

    def _known_spec(self, key: MessageKey) -> Spec | None:
        """What a message looks like, if that is known before it comes."""
        if key.is_gradient:
            activation = self._specs.get(key.back)
            return None if activation is None else activation.gradients()
        spec = self._specs.get(key) if self._keep_specs else None
        return None if spec is None or spec.varies else spec

    def _start_receive(self, key: MessageKey, spec: Spec, incoming: _Incoming) -> None:
        buffers = [self._buffers.take(described) for described in spec.tensors]
        works = [self._irecv(buffer, key, incoming.source) for buffer in buffers]
        incoming.posted[key] = _Posted(works, spec, buffers)

    def _receive_spec(self, key: MessageKey, source: int) -> Spec:
        size = torch.empty(1, dtype=torch.int64, device=self._groups.device)
        self._groups.attempt(self._irecv(size, key, source).wait)
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self._groups.device)
        self._groups.attempt(self._irecv(text, key, source).wait)
        spec: Spec = pickle.loads(text.cpu().numpy().tobytes())
        self._specs[key] = spec
        return spec

    def _irecv(self, tensor: Tensor, key: MessageKey, source: int) -> Any:
        source = self._groups.members[source]
        return self._groups.attempt(dist.irecv, tensor, source, group=self._group(key), tag=self.tag(key))

    # Sending

    def send(self, key: MessageKey, payload: Payload) -> None:
        """Start to send a message."""
        spec, tensors = payload
        target = self._rank_of[key.target]
        if target == self._groups.rank:
            self._local[key] = payload
            return
        if not key.is_gradient:
            known = self._known_spec(key)
            if known is None:
                self._send_spec(key, spec, target)
            elif known != spec:
                raise PipelineError(
                    f"stage {key.source}'s output for microbatch {key.microbatch} must have the shapes of the step "
                    "before, as the batch has",
                    got=f"{spec.shapes()}, not {known.shapes()}",
                    fix="pass dynamic=True, if the shapes of outputs depend on the data",
                )
        for tensor in tensors:
            self._isend(tensor, key, target)

    def _send_spec(self, key: MessageKey, spec: Spec, target: int) -> None:
        device = self._groups.device
        text = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8).to(device)
        self._isend(torch.tensor([text.numel()], dtype=torch.int64, device=device), key, target)
        self._isend(text, key, target)
        self._specs[key] = spec

    def _isend(self, tensor: Tensor, key: MessageKey, target: int) -> None:
        tensor, target = tensor.contiguous(), self._groups.members[target]
        work = self._groups.attempt(dist.isend, tensor, target, group=self._group(key), tag=self.tag(key))
        self._sending.setdefault(key, []).append((work, tensor))

    def _finish_sending(self, key: MessageKey) -> None:
        for work, _ in self._sending.pop(key, ()):
            self._groups.attempt(work.wait)

    def tag(self, key: MessageKey) -> int:
        """A number that no other message has in its group and step; the tensors of one message arrive in order."""
        number = key.microbatch * len(self._channels) + self._channels[key.channel]
        return number * len(self._rank_of) + key.source

    def _group(self, key: MessageKey) -> Any:
        return self._groups.gradients if key.is_gradient else self._groups.activations


def _incoming(schedule: Schedule, routes: Routes, training: bool, rank: int) -> dict[tuple[int, bool], _Incoming]:
    """What arrives at ``rank`` in a step, by the rank it comes from and whether it is a gradient."""
    found: dict[tuple[int, bool], _Incoming] = {}
    rank_of = schedule.stage_ranks()
    for source, steps in enumerate(schedule.actions):
        for action in (action for step in steps for action in step.actions):
            for key in routes.sent(action) if source != rank and (training or action.op == "F") else ():
                if rank_of[key.target] == rank:
                    found.setdefault((source, key.is_gradient), _Incoming(source)).queue.append(key)
    return found
