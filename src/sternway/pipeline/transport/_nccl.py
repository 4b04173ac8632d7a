"""CUDA tensors over NCCL: a communicator for each edge between two ranks, so that no message waits for another edge's.

On a GPU nothing here waits on the host. To send is to put an operation behind the work that makes the tensors; to
receive, to make the compute stream wait for an operation that was put on a stream of its own before. The host may be
far ahead of both.

    compute    … F3 ─┐send      ┌─ F4 …
    edge 0→1         └─[send]   │ wait: an event, not the host
    edge 1→2   [receive]────────┘   posted early, into memory that the receiving stream owns

Memory: receive buffers are allocated on the receiving stream and recorded on the compute stream, so that the caching
allocator hands them out again when both are done with them. What is sent is held until its operation is over.

NCCL connects two ranks when they first use a communicator, and waits for both. That is done when an edge is opened, in
the one order that all ranks follow (``_order.edges_of``). Later, in a step, it would deadlock.

When a rank is lost, communicators are aborted (``_groups.py``): then operations end at once, with garbage.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from sternway._torch.distributed import StreamWork
from sternway.pipeline.faults._stream_watch import StreamWatch
from sternway.pipeline.transport._carrier import Arriving, Carrier
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._order import RankEdge, edges_of
from sternway.pipeline.transport._payload import Spec
from sternway.pipeline.transport._routes import MAIN, MessageKey, Routes
from sternway.schedule import Schedule


@final
class NcclCarrier(Carrier):
    """CUDA tensors over NCCL."""

    host_waits = False

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._open: dict[RankEdge, Any] = {}
        self._sending: dict[RankEdge, deque[tuple[StreamWork, list[Tensor]]]] = {}  # and the tensors they read
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._watch = StreamWatch(self._failed)
        if groups.watch is not None:
            groups.watch.follow(waits=self._watch.waits)

    def _failed(self, error: str) -> None:
        if self._groups.watch is not None:
            self._groups.watch.tell(f"its GPU failed: {error}")

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        for edge in edges_of(schedule, routes):
            if self._groups.rank in (edge.source, edge.target):
                self._communicator(edge)

    def _communicator(self, edge: RankEdge) -> Any:
        if edge not in self._open:
            self._open[edge] = self._groups.communicator([edge.source, edge.target], self._device)
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._post(edge, [first]).wait()
        return self._open[edge]

    def _post(self, edge: RankEdge, tensors: Sequence[Tensor]) -> StreamWork:
        is_send = self._groups.rank == edge.source
        return self._groups.post(self._communicator(edge), tensors, int(is_send), is_send=is_send)

    def send(self, key: MessageKey, tensors: Sequence[Tensor], target: int) -> None:
        self._watch.begin()
        edge = RankEdge(self._groups.rank, target, key.channel, key.is_gradient)
        sending = self._sending.setdefault(edge, deque())
        _drop_completed(sending)
        if parts := [_as_bytes(tensor) for tensor in tensors if tensor.numel()]:
            sending.append((self._post(edge, parts), parts))

    def receive(self, key: MessageKey, spec: Spec, source: int) -> Arriving:
        self._watch.begin()
        edge = RankEdge(source, self._groups.rank, key.channel, key.is_gradient)
        # The host is far ahead: without this the receive would occupy the GPU long before its message is made.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            tensors = [described.empty(self._device) for described in spec.tensors]
            parts = [_as_bytes(tensor) for tensor in tensors if tensor.numel()]
            work = self._post(edge, parts) if parts else None
        return _OnStream(tensors, work, self._groups, self._device)

    def answered(self, key: MessageKey) -> None:
        """Nothing to do: sends are looked after when the next one is posted."""

    def end_step(self) -> None:
        for sending in self._sending.values():
            _drop_completed(sending)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        end.record(torch.cuda.current_stream(self._device))
        self._watch.end(end)

    def round_trip(self, message: Tensor, peer: int) -> float:
        """Over the edges that a pipeline will most likely use later: activations there, gradients back."""
        low, high = sorted((self._groups.rank, peer))
        edges = RankEdge(low, high, MAIN, False), RankEdge(high, low, MAIN, True)
        for edge in edges:
            self._communicator(edge)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        for edge in edges:
            self._post(edge, [message]).wait()
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def drop(self) -> None:
        self._watch.stop()
        self._sending.clear()
        self._open.clear()


@final
class _OnStream(Arriving):
    def __init__(
        self, tensors: list[Tensor], work: StreamWork | None, groups: ProcessGroups, device: torch.device
    ) -> None:
        self.tensors, self._work, self._groups, self._device = tensors, work, groups, device

    def wait(self) -> None:
        """The current stream waits, and not the host."""
        if self._work is not None:
            self._groups.attempt(self._work.wait)
        stream = torch.cuda.current_stream(self._device)
        for tensor in self.tensors:
            tensor.record_stream(stream)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes: NCCL does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _drop_completed(sending: deque[tuple[StreamWork, list[Tensor]]]) -> None:
    while sending and sending[0][0].is_completed():
        sending.popleft()
