"""One rank a process, over torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from sternway._torch import require
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline.faults._lost import Position
from sternway.pipeline.transport._carrier import Carrier, GlooCarrier
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._crew import Crew
from sternway.pipeline.transport._facts import StepFacts
from sternway.pipeline.transport._groups import ProcessGroups, check_members, in_order
from sternway.pipeline.transport._herald import Herald
from sternway.pipeline.transport._later import LateTalk, Rows
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._messenger import Messenger
from sternway.pipeline.transport._nccl import NcclCarrier
from sternway.pipeline.transport._place import check_device, join_processes, one_kind, with_index
from sternway.pipeline.transport._routes import RankProgram, Receive, Routes
from sternway.pipeline.transport._sends import Sends
from sternway.pipeline.transport._transport import Transport, device_of
from sternway.schedule import Schedule

_PINGS = 9
_COPY_TAG = 2  # no other message between two ranks of the control group has it


@final
class DistTransport(Transport):
    """Carries messages over torch.distributed, one rank in each process.

    Args:
        ranks: the global ranks that form the pipeline, in its order; all by default.
        device: where the stages must be: "cpu" or "cuda", over gloo or NCCL; wherever they are by default.
        dynamic: the shapes of stages' outputs depend on the data, so they are sent every time.
        timeout: how many seconds to wait for a message, or on a GPU for a step, before giving up.
        heartbeat_timeout: a rank that gives no sign of life for so many seconds is lost; 0 to watch for none.
        watched: the global ranks whose loss ends the pipeline; its own by default.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        *,
        dynamic: bool = False,
        timeout: float = 600,
        heartbeat_timeout: float = 30,
        watched: Sequence[int] | None = None,
    ) -> None:
        for name, value in (("timeout", timeout), ("heartbeat_timeout", heartbeat_timeout)):
            if not isinstance(value, int | float) or not 0 <= value < 1e6 or (name == "timeout" and value == 0):
                raise PipelineError(f"{name} must be a number of seconds", got=repr(value), fix=f"pass {name}=30")
        join_processes()
        require("pipeline")
        self._wanted = None if device is None else device_of(device)
        self.device, members = torch.device("cpu"), check_members(ranks)
        self._watched = list(watched or members)
        self._groups = ProcessGroups(members, timeout, heartbeat_timeout, self._watched)
        self._messenger: Messenger | None = None  # until it is known where the stages are
        self._dynamic, self._timeout = dynamic, timeout
        self._herald: Herald | None = None  # until there is a schedule
        self._late_talk: dict[tuple[int, ...], LateTalk] = {}  # by their members
        self._copies = Sends(self._groups)
        self.ranks, self.rank = len(members), self._groups.rank
        self.mine = (self.rank,)
        self.watch = self._groups.watch
        self._enders: list[Callable[[], None]] = []  # each lets threads end that hold nothing of this transport
        if self.watch is not None:
            awaited = weakref.WeakMethod(self._awaited)
            self.watch.follow(awaited=lambda place: None if (call := awaited()) is None else call(place))
            self._enders.append(self.watch.abandon)
        self._dropped = weakref.finalize(self, _end_all, self._enders)
        self._dropped.atexit = False  # threads see to that themselves

    def place(self, devices: Sequence[torch.device]) -> None:
        everyone = self.crew().agree(lambda: check_device(devices, self._wanted))
        kind = one_kind(everyone)
        self.device = everyone[self.rank] or with_index(torch.device(kind))
        host = GlooCarrier(self._groups, self.device)
        self._carrier: Carrier = NcclCarrier(self._groups, self.device) if kind == "cuda" else host
        self._messenger = Messenger(self._groups, self._carrier, host, self._dynamic)
        self._enders.append(self._carrier.abandon)

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        try:
            self._messages.connect(schedule, routes)
        except LostRankError as error:
            self.fail(error)
            raise
        self._herald = Herald(self._groups, schedule)

    @property
    def _messages(self) -> Messenger:
        assert self._messenger is not None, "place() comes first"
        return self._messenger

    def drive(self, programs: dict[int, RankProgram], facts: StepFacts) -> None:
        program, messages = programs[self.rank], self._messages
        self._check_lost()
        messages.begin(facts.shapes, facts.training)
        try:
            request = next(program)
            while True:
                if isinstance(request, Receive):
                    request = program.send(messages.receive(request.key))
                else:
                    messages.send(request.key, request.payload)
                    del request  # the program goes on, and the message may be gone before it sends the next one
                    request = next(program)
        except StopIteration:
            pass
        messages.finish()
        self._copies.finish()
        if self._herald is not None:
            self._herald.finish()
        self._check_lost()

    def _check_lost(self) -> None:
        """Raise if a rank was lost: no call needs to have failed since, and a GPU may have computed garbage."""
        if self.watch is not None and self.watch.lost is not None:
            raise self.watch.lost.error(self.rank)

    # All ranks at once

    def announce(self, prepare: Callable[[], StepFacts]) -> StepFacts:
        assert self._herald is not None, "connect() comes first"
        return self._herald.announce(prepare)

    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        mine = torch.tensor(numbers[0], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._groups.attempt(dist.all_gather, rows, mine, group=self._groups.control)
        return [row.tolist() for row in in_order(rows, self._groups.members)]

    def gather_later(self, numbers: Callable[[], Rows], members: Sequence[int] | None = None) -> Callable[[], Rows]:
        return self._talk_of(members).gather(lambda: numbers()[0])

    def hear_later(self, said: bytes, members: Sequence[int] | None = None) -> Callable[[], bytes]:
        return self._talk_of(members).hear(said)

    def _talk_of(self, members: Sequence[int] | None) -> LateTalk:
        among = tuple(members or self._groups.members)
        if among not in self._late_talk:
            made = LateTalk(self._groups.new(among), among, self._groups.explain)
            self._late_talk[among] = made
            self._enders.append(made.abandon)
        return self._late_talk[among]

    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        group = self._groups.of_ranks(ranks, self.device)
        for tensor in tensors:
            self._groups.attempt(self._groups.attempt(group.sum, tensor).wait)

    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        if self.device.type == "cuda":
            group = self._groups.of_ranks(ranks, self.device)
            self._groups.attempt(self._groups.attempt(group.copy, tensor, list(ranks).index(source)).wait)
        elif self.rank == source:
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            for other in ranks:  # to each one, so that nobody waits for a third
                if other != source:
                    self._copies.add(self._post_copy(dist.isend, sent, other), sent)
        else:
            received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self._groups.attempt(self._post_copy(dist.irecv, received, source).wait)
            tensor.copy_(received)

    def _post_copy(self, call: Any, tensor: Tensor, other: int) -> Any:
        group = self._groups.control
        return self._groups.attempt(call, tensor, self._groups.members[other], group=group, tag=_COPY_TAG)

    def delay(self, nbytes: int) -> float:
        """Half of a round trip between the first two ranks: the median of several."""
        found = [0.0]
        if self.ranks > 1 and self.rank < 2:
            message = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=self.device)
            found = [self._carrier.round_trip(message, 1 - self.rank) / 2 for _ in range(_PINGS)]
        return self.gather([[statistics.median(found)]])[0][0]

    def crew(self) -> Crew:
        return Crew(self._groups.control, self.explain, members=self._groups.members)

    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        among = members or self._groups.members
        return Crew(self._groups.new(among), self.explain, members=among)

    def collective(self, members: Sequence[int]) -> Collective:
        return self._groups.of_members(members, self.device)

    # Failure

    def explain(self, error: Exception) -> PipelineError:
        return self._groups.explain(error)

    def fail(self, error: BaseException) -> None:
        self._dropped.detach()
        self._groups.tell(error)
        self._copies.drop()
        if self._messenger is not None:
            self._messenger.close(0.0)
        if self._late_talk or self.device.type == "cuda":
            self._groups.wake()  # threads that wait for other ranks
        for each in self._late_talk.values():
            each.stop()
        self._groups.close(failed=True)

    def close(self) -> None:
        self._dropped.detach()
        if self._messenger is not None:
            self._messenger.close(self._timeout)
        if self.device.type == "cuda":  # the host may be ahead of the GPU: let that end what was posted
            try:
                self._groups.attempt(torch.cuda.synchronize, self.device)
                self._check_lost()
            except LostRankError as error:
                self.fail(error)
                raise
        for each in self._late_talk.values():
            each.stop(self._timeout)
        self._copies.finish()
        self._groups.close()

    def _awaited(self, place: int) -> Position | None:
        """The action that this rank waits for, if it is the watched rank at this place that does it."""
        awaited = None if self._messenger is None else self._messenger.awaited
        if awaited is None or self.watch is None or self._watched[place] != self._groups.members[awaited[1]]:
            return None
        key = awaited[0]
        action = f"{key.source}{'I' if key.is_gradient else 'F'}{key.microbatch}"
        return Position(self.watch.position().step, key.source, action)


def default_transport(mesh: PipelineMesh | None, dynamic: bool, heartbeat_timeout: float) -> DistTransport:
    """The transport of a pipeline that is given none: over all processes, or over those of a mesh."""
    if mesh is None:
        return DistTransport(dynamic=dynamic, heartbeat_timeout=heartbeat_timeout)
    return DistTransport(
        mesh.pipeline,
        mesh.device_type,
        dynamic=dynamic,
        heartbeat_timeout=heartbeat_timeout,
        watched=mesh.everyone,
    )


def _end_all(enders: list[Callable[[], None]]) -> None:
    """Nobody holds a transport any more, and nobody closed it."""
    for end in enders:
        end()
