"""CUDA tensors over NCCL: a communicator for each edge between two ranks, so that no message waits for another edge's.

The host never waits for the GPU here. It waits until a message is on its way (``_edges.py``), and then makes the
compute stream wait for it; meanwhile the GPU is at work on what came before.

    compute    … F3 ─┐ made     ┌─ F4 …
    edge 0→1         └─[send]   │ wait: an event, not the host
    edge 1→2   [receive]────────┘ into memory that the receiving stream owns

Memory: receive buffers are allocated on the receiving stream and recorded on the compute stream, so that the caching
allocator hands them out again when both are done with them. What is sent is held until its operation is over.

NCCL connects two ranks when they first use a communicator, and waits for both. That is done when an edge is opened, in
the one order that all ranks follow (``_order.edges_of``). Later, in a step, it would deadlock.

When a rank is lost, communicators are aborted (``_groups.py``): then operations end at once, with garbage.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from sternway._torch.distributed import StreamWork
from sternway.pipeline.faults._stream_watch import StreamWatch
from sternway.pipeline.transport._carrier import Arriving, Carrier
from sternway.pipeline.transport._edges import Incoming, Outgoing, as_bytes
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._order import RankEdge, edges_of
from sternway.pipeline.transport._payload import Spec, pack
from sternway.pipeline.transport._place import gpu_fault
from sternway.pipeline.transport._routes import MAIN, MessageKey, Routes
from sternway.schedule import Schedule


@final
class NcclCarrier(Carrier):
    """CUDA tensors over NCCL."""

    ahead = 1_000_000  # buffers are allocated when a message is there

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._open: dict[RankEdge, Any] = {}
        self._outgoing: dict[RankEdge, Outgoing] = {}
        self._incoming: dict[RankEdge, Incoming] = {}
        self._notes: Any = groups.attempt(groups.new, groups.members)  # over which ranks tell each other of messages
        atexit.register(self.drop)  # what was sent before Python ends arrives
        self._watch = StreamWatch(self._failed)
        if groups.watch is not None:
            groups.watch.follow(waits=self._watch.waits)

    def _failed(self, error: str) -> None:
        if self._groups.watch is not None:
            self._groups.watch.tell(f"its GPU failed: {error}")

    def _send_failed(self) -> None:
        """A send failed. If that is because the GPU did, the host may wait for a message that will never be sent."""
        if (fault := gpu_fault()) is not None:
            self._failed(fault)
            self._groups.wake()

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        for edge in edges_of(schedule, routes):
            if self._groups.rank in (edge.source, edge.target):
                self._open_edge(edge)

    def _open_edge(self, edge: RankEdge) -> None:
        """Connect the two ranks of an edge, unless they are; both call it."""
        if edge in self._open:
            return
        tag = sum({other.source, other.target} == {edge.source, edge.target} for other in self._open)
        self._communicator(edge)
        name, post = f"sternway-{edge}", functools.partial(self._post, edge)
        if self._groups.rank == edge.source:
            tell = functools.partial(self._note, dist.isend, edge.target, tag)
            self._outgoing[edge] = Outgoing(name, self._device, post, tell, self._send_failed)
        else:
            hear = functools.partial(self._note, dist.irecv, edge.source, tag)
            self._incoming[edge] = Incoming(name, self._device, post, hear)

    def _note(self, call: Any, other: int, tag: int) -> Any:
        """Begin to tell another rank of a message, or to hear of one."""
        return call(torch.zeros(1, dtype=torch.uint8), self._groups.members[other], group=self._notes, tag=tag)

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
        outgoing = self._outgoing[RankEdge(self._groups.rank, target, key.channel, key.is_gradient)]
        outgoing.put([as_bytes(tensor) for tensor in tensors if tensor.numel()])

    def receive(self, key: MessageKey, spec: Spec, source: int) -> Arriving:
        self._watch.begin()
        return self._arriving(RankEdge(source, self._groups.rank, key.channel, key.is_gradient), spec)

    def _arriving(self, edge: RankEdge, spec: Spec) -> Arriving:
        return _Announced(self._incoming[edge].put(spec), self._groups, self._device)

    def answered(self, key: MessageKey) -> None:
        """Nothing to do: the edge's thread keeps what is sent."""

    def end_step(self) -> None:
        for outgoing in self._outgoing.values():
            self._groups.attempt(outgoing.check)
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        end.record(torch.cuda.current_stream(self._device))
        self._watch.end(end)

    def round_trip(self, message: Tensor, peer: int) -> float:
        """Over the edges that a pipeline will most likely use later: activations there, gradients back."""
        low, high = sorted((self._groups.rank, peer))
        there, back = RankEdge(low, high, MAIN, False), RankEdge(high, low, MAIN, True)
        for edge in (there, back):
            self._open_edge(edge)
        spec, _ = pack(message)
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        if self._groups.rank == low:
            self._outgoing[there].put([message])
            self._arriving(back, spec).wait()
        else:
            arriving = self._arriving(there, spec)
            arriving.wait()
            self._outgoing[back].put(arriving.tensors)
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    def abandon(self) -> None:
        self._watch.stop()
        for edge in (*self._outgoing.values(), *self._incoming.values()):
            edge.stop()

    def drop(self, timeout: float = 5.0) -> None:
        atexit.unregister(self.drop)
        self._watch.stop()
        edges = *self._outgoing.values(), *self._incoming.values()
        for edge in edges:
            edge.stop()
        end = time.monotonic() + timeout
        for edge in edges:
            edge.join(max(0.0, end - time.monotonic()))
        self._outgoing.clear()
        self._incoming.clear()
        self._open.clear()
        self._notes = None


@final
class _Announced(Arriving):
    def __init__(
        self, found: Future[tuple[list[Tensor], StreamWork | None]], groups: ProcessGroups, device: torch.device
    ) -> None:
        self._found, self._groups, self._device = found, groups, device

    def wait(self) -> None:
        """The host waits until the message is on its way, and the current stream until it is there."""
        self.tensors, work = self._groups.attempt(self._found.result)
        if work is not None:
            self._groups.attempt(work.wait)
        stream = torch.cuda.current_stream(self._device)
        for tensor in self.tensors:
            tensor.record_stream(stream)
