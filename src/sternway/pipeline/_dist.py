"""One rank a process, over torch.distributed: gloo on CPUs, NCCL on GPUs.

Messages go through two process groups of the pipeline's own, activations and gradients. Sends are asynchronous and kept
alive until they are done; receives are posted ahead, in the order in which the sender sends, which NCCL needs and gloo
does not mind.

Shapes. The first time, each activation is preceded by its description. Both ends keep it, and while the batch has the
same shapes they send tensors alone. At the start of a step all ranks compare notes: if the batch's shapes are new,
descriptions are sent again. A gradient needs none, being like its activation.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from sternway._tree import leaves
from sternway.errors import PipelineError
from sternway.pipeline._buffers import Buffers
from sternway.pipeline._groups import GroupTransport
from sternway.pipeline._payload import Place, Spec
from sternway.pipeline._run import Receive, Routes, Slot, Work
from sternway.pipeline._stage import MAIN, Payload
from sternway.pipeline._watch import Spot
from sternway.schedule import Schedule

AHEAD = 2  # receives posted before they are needed, from each rank in each direction
_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(slots=True)
class _Posted:
    works: list[Any]
    spec: Spec
    buffers: list[Tensor]


@final
class DistTransport(GroupTransport):
    """Messages over torch.distributed.

    Args:
        ranks: the global ranks that form the pipeline, in its order; all, unless given.
        device: where stages compute; a CUDA device means NCCL, the CPU gloo.
        dynamic: send descriptions every time, for stages whose outputs' shapes depend on the data.
        timeout: how long to wait for a message before giving up.
        heartbeat_timeout: a rank that gives no sign of life for so many seconds is lost; 0 to look for none.
        watched: the global ranks whose loss ends the pipeline; its own, unless given.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        *,
        dynamic: bool = False,
        timeout: float = 600,
        heartbeat_timeout: float = 30,
        watched: Sequence[int] | None = None,
    ) -> None:
        super().__init__(ranks, device, timeout, heartbeat_timeout, watched)
        if self.watch is not None:
            self.watch.awaited = self._not_done
        self.dynamic = dynamic
        self._signature: tuple[int, ...] = ()
        self._described = False  # whether this step's activations come without descriptions
        self._specs: dict[Slot, Spec] = {}
        self._mail: dict[Slot, Payload] = {}
        self._buffers = Buffers(self.device)
        self._sending: dict[Slot, list[tuple[Any, Tensor]]] = {}  # works and what they read, until done
        self._channels: dict[str, int] = {}
        self._awaited: tuple[Slot, int] | None = None

    # Messages

    def drive(self, works: dict[int, Work], schedule: Schedule, routes: Routes, training: bool) -> None:
        work = works[self.rank]
        queues = self._expected(schedule, routes, training)
        posted: dict[Slot, _Posted] = {}
        rank_of = schedule.stage_ranks()
        self._channels = {name: number for number, name in enumerate([MAIN, *sorted(routes.skips)])}
        # What will be described anew in this step is not known before.
        self._specs = {slot: spec for slot, spec in self._specs.items() if self._described and not _varies(spec)}
        self._post(queues, posted, rank_of)
        try:
            request = next(work)
            while True:
                if isinstance(request, Receive):
                    answer = self._receive(request.slot, queues, posted, rank_of)
                    request = work.send(answer)
                else:
                    self._send(request.slot, request.payload, rank_of[request.slot.target])
                    request = next(work)
        except StopIteration:
            pass
        for slot in list(self._sending):
            self._finish_sending(slot)
        self._buffers.clear()

    def _expected(self, schedule: Schedule, routes: Routes, training: bool) -> list[deque[Slot]]:
        """What will arrive from each other rank in each direction, in the order it is sent."""
        rank_of = schedule.stage_ranks()
        queues: dict[tuple[int, bool], deque[Slot]] = {}
        for source, steps in enumerate(schedule.actions):
            for action in (part for step in steps for part in step.actions):
                for slot in routes.sent(action) if source != self.rank and (training or action.op == "F") else ():
                    if rank_of[slot.target] == self.rank:
                        queues.setdefault((source, slot.target < slot.source), deque()).append(slot)
        return list(queues.values())

    def _post(self, queues: list[deque[Slot]], posted: dict[Slot, _Posted], rank_of: tuple[int, ...]) -> None:
        for queue in queues:
            while queue and sum(slot in posted for slot in posted if self._same_queue(slot, queue[0])) < AHEAD:
                spec = self._known_spec(queue[0])
                if spec is None:
                    break
                slot = queue.popleft()
                posted[slot] = self._start_receive(slot, spec, rank_of[slot.source])

    @staticmethod
    def _same_queue(slot: Slot, other: Slot) -> bool:
        return slot.source == other.source and (slot.target < slot.source) == (other.target < other.source)

    def _known_spec(self, slot: Slot) -> Spec | None:
        """What a message looks like, if that is known before it comes."""
        if slot.target < slot.source:
            activation = self._specs.get(slot.back)
            return None if activation is None else activation.gradients()
        spec = self._specs.get(slot)
        return spec if self._described and (spec is None or not _varies(spec)) else None

    def _start_receive(self, slot: Slot, spec: Spec, source: int) -> _Posted:
        buffers = [self._buffers.take(described) for described in spec.tensors]
        group = self._group(slot)
        works = [
            self._try(dist.irecv, buffer, self.members[source], group=group, tag=self._tag(slot, index))
            for index, buffer in enumerate(buffers)
        ]
        return _Posted(works, spec, buffers)

    def _receive(
        self, slot: Slot, queues: list[deque[Slot]], posted: dict[Slot, _Posted], rank_of: tuple[int, ...]
    ) -> Payload:
        if rank_of[slot.source] == self.rank:
            return self._mail.pop(slot)
        if slot not in posted:
            for queue in queues:
                if slot in queue:
                    queue.remove(slot)
            spec = self._known_spec(slot) or self._receive_spec(slot, rank_of[slot.source])
            posted[slot] = self._start_receive(slot, spec, rank_of[slot.source])
        self._awaited = slot, rank_of[slot.source]
        for work in posted[slot].works:
            self._wait(work)
        self._awaited = None
        arrived = posted.pop(slot)
        self._finish_sending(slot.back)  # its answer is here, so that it has arrived
        self._post(queues, posted, rank_of)
        return arrived.spec, arrived.buffers

    def _receive_spec(self, slot: Slot, source: int) -> Spec:
        size = torch.empty(1, dtype=torch.int64, device=self.device)
        group, rank = self._group(slot), self.members[source]
        self._wait(self._try(dist.irecv, size, rank, group=group, tag=self._tag(slot, -2)))
        text = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        self._wait(self._try(dist.irecv, text, rank, group=group, tag=self._tag(slot, -1)))
        spec: Spec = pickle.loads(text.cpu().numpy().tobytes())
        self._specs[slot] = spec
        return spec

    def _send(self, slot: Slot, payload: Payload, target: int) -> None:
        spec, tensors = payload
        is_activation = slot.target > slot.source
        if target == self.rank:
            self._mail[slot] = payload
            return
        if is_activation:
            known = self._known_spec(slot)
            if known is None:
                self._send_spec(slot, spec, target)
            elif known != spec:
                raise PipelineError(
                    f"stage {slot.source}'s output for microbatch {slot.microbatch} is like that of the step before, "
                    "as the batch is",
                    got=f"{_shapes(spec)}, not {_shapes(known)}",
                    fix="pass dynamic=True, where outputs' shapes depend on the data",
                )
        for index, tensor in enumerate(tensors):
            self._start_send(tensor, slot, index, target)

    def _send_spec(self, slot: Slot, spec: Spec, target: int) -> None:
        text = torch.frombuffer(bytearray(pickle.dumps(spec)), dtype=torch.uint8).to(self.device)
        self._start_send(torch.tensor([text.numel()], dtype=torch.int64, device=self.device), slot, -2, target)
        self._start_send(text, slot, -1, target)
        self._specs[slot] = spec

    def _start_send(self, tensor: Tensor, slot: Slot, index: int, target: int) -> None:
        tensor = tensor.contiguous()
        tag = self._tag(slot, index)
        work = self._try(dist.isend, tensor, self.members[target], group=self._group(slot), tag=tag)
        self._sending.setdefault(slot, []).append((work, tensor))

    def _finish_sending(self, slot: Slot) -> None:
        for work, _ in self._sending.pop(slot, ()):
            self._wait(work)

    def _tag(self, slot: Slot, index: int) -> int:
        """A number that no other message between the two ranks has in this step."""
        channels = len(self._channels)
        return ((slot.microbatch * 4096 + slot.source) * channels + self._channels[slot.channel]) * 64 + index + 2

    def _group(self, slot: Slot) -> Any:
        return self._groups["gradients" if slot.target < slot.source else "activations"]

    def _wait(self, work: Any) -> None:
        self._try(work.wait)

    def checked(self, prepare: Callable[[], list[float]]) -> list[list[float]]:
        problem: Exception | None = None
        facts: list[float] = []
        self._mistakes += 1
        key = f"mistake/{self._mistakes}"
        try:
            facts = prepare()
        except Exception as error:
            problem = error
            with suppress(RuntimeError):
                self._store.compare_set(key, "", f"rank {self.rank}: {type(error).__name__}: {error}")
        width = 8
        rows = self.gather([[float(problem is None), *map(float, facts), *[0.0] * (width - len(facts))]])
        if problem is not None:
            raise problem
        if not all(row[0] for row in rows):
            cause = self._try(self._store.get, key).decode()
            raise PipelineError("all ranks begin a step alike", got=cause, fix="mend the cause on that rank")
        described = [
            int(number) for row in rows for number in row[1:3]
        ]  # the batch's shapes, as the first rank has them
        signature = tuple(described)
        self._described = signature == self._signature and not self.dynamic
        if signature != self._signature:
            self._specs.clear()
        self._signature = signature
        return [row[1 : 1 + len(facts)] for row in rows]

    def _not_done(self, place: int) -> Spot | None:
        """What the rank at this place in the watch has not done yet, if this rank waits for that."""
        if self._awaited is None or self.watch is None or self._watched[place] != self.members[self._awaited[1]]:
            return None
        slot = self._awaited[0]
        op = "F" if slot.target > slot.source else "I"
        return Spot(self.watch.spot().step, slot.source, f"{slot.source}{op}{slot.microbatch}")

    def close(self) -> None:
        self._sending.clear()
        self._mail.clear()
        super().close()


def transport_of(mesh: Any, dynamic: bool, heartbeat_timeout: float) -> DistTransport:
    """What a pipeline uses unless it is told: all processes, or a mesh's."""
    if mesh is None:
        return DistTransport(dynamic=dynamic, heartbeat_timeout=heartbeat_timeout)
    if not dist.is_initialized():
        raise PipelineError("a mesh needs torch.distributed", got="no process group", fix="start with torchrun")
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if "pp" not in names or "dp" not in names:
        raise PipelineError('a mesh has the dimensions "dp" and "pp"', got=str(names), fix="name them so")
    return DistTransport(
        dist.get_process_group_ranks(mesh.get_group("pp")),
        "cuda" if mesh.device_type == "cuda" else "cpu",
        dynamic=dynamic,
        heartbeat_timeout=heartbeat_timeout,
        watched=mesh.mesh.flatten().tolist(),
    )


def _varies(spec: Spec) -> bool:
    """Whether a description holds values that may differ from step to step."""
    return any(not isinstance(leaf, (*_CONSTANTS, Place)) for leaf in leaves(spec.tree))


def _shapes(spec: Spec) -> str:
    return ", ".join(str(tensor.shape) for tensor in spec.tensors) or "no tensors"
