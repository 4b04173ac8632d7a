"""What carries the tensors of messages between this rank and the others: over gloo here, over NCCL in ``_nccl.py``.

A message of several tensors is posted as one. Both ends know their shapes by then (``_messenger.py``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from sternway.pipeline.transport._buffers import Buffers
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._payload import Spec
from sternway.pipeline.transport._routes import MessageKey, Routes
from sternway.schedule import Schedule


class Arriving(ABC):
    """A message that is being received into ``tensors``."""

    tensors: list[Tensor]

    @abstractmethod
    def wait(self) -> None:
        """Return when what follows may use the tensors."""


class Carrier(ABC):
    """Carries the tensors of messages. The ranks are those of the pipeline.

    Attributes:
        ahead: how many messages of an edge may be asked for before they are needed.
    """

    ahead: int

    @abstractmethod
    def connect(self, schedule: Schedule, routes: Routes) -> None:
        """Open what the messages of a schedule need. All ranks call it together."""

    @abstractmethod
    def send(self, key: MessageKey, tensors: Sequence[Tensor], target: int) -> None:
        """Start to send a message. Its tensors are contiguous."""

    @abstractmethod
    def receive(self, key: MessageKey, spec: Spec, source: int) -> Arriving:
        """Start to receive a message. Those of one edge are received as they are sent, and in that order."""

    @abstractmethod
    def answered(self, key: MessageKey) -> None:
        """A message that was sent has arrived, because one that was sent after that has come."""

    @abstractmethod
    def end_step(self) -> None:
        """All messages of a step were posted."""

    @abstractmethod
    def round_trip(self, message: Tensor, peer: int) -> float:
        """The seconds that a message takes to another rank and back. Both call it; the lower rank sends first."""

    def abandon(self) -> None:  # noqa: B027  # there need not be threads
        """Nobody can use the pipeline any more: let threads end by themselves, without a wait and without locks."""

    @abstractmethod
    def drop(self, timeout: float) -> None:
        """Forget what is under way after so many seconds, since the pipeline is closed."""


@final
class GlooCarrier(Carrier):
    """Tensors over gloo, through the host if they are on a GPU.

    Activations and gradients have a process group each; tags tell messages apart. Sends are asynchronous, and their
    tensors are kept until they are done.
    """

    ahead = 2

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._buffers = Buffers(torch.device("cpu"))
        self._sending: dict[MessageKey, list[tuple[Any, Tensor]]] = {}  # works, and the tensors they read
        self._tag: Callable[[MessageKey], int] = lambda key: 0

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        self._tag = routes.tag

    def send(self, key: MessageKey, tensors: Sequence[Tensor], target: int) -> None:
        for tensor in tensors:
            work = self._post(dist.isend, tensor := tensor.cpu(), key, target)
            self._sending.setdefault(key, []).append((work, tensor))

    def receive(self, key: MessageKey, spec: Spec, source: int) -> Arriving:
        buffers = [self._buffers.take(described) for described in spec.tensors]
        works = [self._post(dist.irecv, buffer, key, source) for buffer in buffers]
        return _OnHost(buffers, works, self._groups, self._device)

    def _post(self, call: Any, tensor: Tensor, key: MessageKey, other: int) -> Any:
        group = self._groups.gradients if key.is_gradient else self._groups.activations
        return self._groups.attempt(call, tensor, self._groups.members[other], group=group, tag=self._tag(key))

    def answered(self, key: MessageKey) -> None:
        for work, _ in self._sending.pop(key, ()):
            self._groups.attempt(work.wait)

    def end_step(self) -> None:
        for key in list(self._sending):
            self.answered(key)
        self._buffers.clear()

    def round_trip(self, message: Tensor, peer: int) -> float:
        there, first = self._groups.members[peer], self._groups.rank < peer
        start = time.perf_counter()
        for call in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
            self._groups.attempt(self._groups.attempt(call, message, there, group=self._groups.activations).wait)
        return time.perf_counter() - start

    def drop(self, timeout: float) -> None:
        self._sending.clear()


@final
class _OnHost(Arriving):
    def __init__(self, tensors: list[Tensor], works: list[Any], groups: ProcessGroups, device: torch.device) -> None:
        self.tensors, self._works, self._groups, self._device = tensors, works, groups, device

    def wait(self) -> None:
        for work in self._works:
            self._groups.attempt(work.wait)
        self.tensors = [tensor.to(self._device) for tensor in self.tensors]
