"""The process groups of a pipeline over torch.distributed, and what happens to them when a rank is lost.

A pipeline has three gloo groups of its own: for activations (on GPUs, for their descriptions), for gradients, and for
control. On GPUs it also has NCCL communicators, for which no host waits. A rank that fails says why
through the store (``faults/_watch.py``) and closes its groups; whoever waits for it is woken by the closed connection,
reads the store, and does the same. A rank that says nothing is missed after a while; then those that wait for it have
their own connections cut.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from sternway._torch import distributed
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline.faults import _sockets
from sternway.pipeline.faults._lost import LostRank
from sternway.pipeline.faults._watch import Watch
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._place import gpu_fault

T = TypeVar("T")

_POSTING_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class ProcessGroups:
    """The groups of one pipeline on one rank. The arguments are those of ``DistTransport``.

    Attributes:
        rank: this process's place among ``members``.
        watch: finds lost ranks; None if there is nothing to watch.
    """

    def __init__(
        self,
        members: list[int],
        timeout: float,
        heartbeat_timeout: float,
        watched: Sequence[int],
    ) -> None:
        self.members, self.rank = members, members.index(dist.get_rank())
        self.watch: Watch | None = None
        self._timeout = timeout
        self._sockets: _sockets.Sockets = frozenset()
        self._disposable: list[Any] = []
        self._communicators: list[Any] = []
        self._posting, self._aborted = threading.Lock(), False
        self.activations: Any = self.new(members)
        self.gradients: Any = self.new(members)
        self.control: Any = self.new(members)
        self._collectives: dict[tuple[int, ...], Collective] = {}
        self._default_store = store = distributed.default_store()
        self._store_port = distributed.store_port(store)
        self.store = PrefixStore(f"sternway/{self.control.group_name}", store)
        self._peers = _sockets.connected(self._sockets, self._store_port)
        if heartbeat_timeout and len(watched) > 1:
            self.watch = Watch(
                store,
                _new_prefix(store, watched),
                list(watched).index(dist.get_rank()),
                len(watched),
                heartbeat_timeout,
                timeout,
                *_store_holder(),
                self.wake,
                self._peer_closed,
                lambda: _sockets.ends(_sockets.opened(), self._store_port),
                lambda addresses: _sockets.cut(_sockets.leading_to(addresses, _sockets.opened()), self._store_port),
            )

    def new(self, members: Sequence[int]) -> Any:
        """A new gloo group of these global ranks. If that is not all processes, only its members make it.

        torch names such a group after its members and the number of groups there are, and a new group of the same name
        finds in the store what the old one left there. So these groups are not destroyed while the process runs, nor
        those of all processes if the pipeline has only some of them: the number would repeat.
        """
        before = _sockets.opened()
        some = len(members) < dist.get_world_size()
        timeout = timedelta(seconds=self._timeout)
        group = dist.new_group(list(members), timeout, "gloo", use_local_synchronization=some)
        if not some and len(self.members) == len(members):
            self._disposable.append(group)
        self._sockets |= _sockets.opened() - before
        return group

    def communicator(self, ranks: Sequence[int], device: torch.device) -> Any:
        """An NCCL communicator of some of the pipeline's ranks; all of them call this."""
        return self._communicator([self.members[rank] for rank in ranks], device)

    def _communicator(self, members: Sequence[int], device: torch.device) -> Any:
        store, before = self._default_store, _sockets.opened()
        place = store, _new_prefix(store, members), members.index(dist.get_rank()), members
        if device.type == "cuda":
            made = self._unless_lost(distributed.nccl_communicator, *place, device, self._timeout)
            self._communicators.append(made)
        else:
            made = self._unless_lost(distributed.gloo_communicator, *place, self._timeout)
            self._sockets |= _sockets.opened() - before
        return made

    def of_ranks(self, ranks: Sequence[int], device: torch.device) -> Collective:
        """Some of the pipeline's ranks, for sums and copies of tensors on ``device``; made once."""
        key = tuple(ranks)
        if key not in self._collectives:
            self._collectives[key] = self.of_members([self.members[rank] for rank in ranks], device)
        return self._collectives[key]

    def of_members(self, members: Sequence[int], device: torch.device) -> Collective:
        """These global ranks, for sums and copies; all of them call this."""
        return Collective(self._communicator(members, device), len(members), self._start)

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call something that needs the other ranks. If a connection is lost, say which rank was."""
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise self.explain(error) from None

    def _unless_lost(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call something that waits for other ranks, and that nothing can wake.

        A thread does it. If a rank is lost meanwhile, the thread is left to itself.
        """
        found: list[Any] = []
        errors: list[Exception] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(call(*arguments))
            except Exception as error:
                errors.append(error)
            done.set()

        threading.Thread(target=run, name="sternway-connect", daemon=True).start()
        while not done.wait(_LOOK_SECONDS):
            if self.watch is not None and self.watch.lost is not None:
                raise self.watch.lost.error(self.rank)
        if errors:
            raise self.explain(errors[0]) from errors[0]
        return found[0]

    def explain(self, error: Exception) -> PipelineError:
        """The error to raise after a connection was lost, or after this rank's own GPU failed."""
        if (fault := gpu_fault()) is not None:
            return PipelineError(
                f"the GPU of rank {self.rank} failed",
                got=fault,
                fix="start this process again; CUDA_LAUNCH_BLOCKING=1 shows which operation failed",
            )
        lost = self.watch.cause() if self.watch is not None else LostRank(None, str(error))
        return lost.error(self.rank)

    def _peer_closed(self) -> bool:
        return _sockets.any_closed(self._peers)

    def wake(self) -> None:
        """Cut the connections of all groups and abort all communicators, so that threads and GPUs that wait wake up.

        What a GPU computes after that is garbage. So whoever waits for a GPU must look at ``watch.lost`` afterwards.
        """
        _sockets.cut(self._sockets, self._store_port)
        self._abort()

    def _abort(self) -> None:
        # NCCL frees what a call that is under way may still use. Only one that hangs is not waited for.
        free = self._posting.acquire(timeout=_POSTING_SECONDS)
        try:
            self._aborted = True
        finally:
            if free:
                self._posting.release()
        distributed.abort_communicators(self._communicators)

    def post(self, communicator: Any, tensors: Sequence[Tensor], peer: int, *, is_send: bool) -> distributed.StreamWork:
        """Start to send or to receive over a communicator (``distributed.post_message``)."""
        call = distributed.post_message
        work: distributed.StreamWork = self.attempt(self._start, call, communicator, tensors, peer, is_send=is_send)
        return work

    def _start(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Start an operation on a communicator, unless they were aborted."""
        with self._posting:
            if self._aborted:
                raise RuntimeError("the communicators were aborted")
            return call(*arguments, **options)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's error, unless it is about the loss of another."""
        if self.watch is not None and not isinstance(error, LostRankError):
            self.watch.tell(f"{type(error).__name__}: {error}")

    def close(self, failed: bool = False) -> None:
        """Stop watching, and destroy the groups: those of all processes, or after a failure all of them."""
        if self.watch is not None:
            self.watch.stop()
        if failed:
            self._abort()
            groups = (self.activations, self.gradients, self.control, *self._disposable)
            self._disposable = list({id(group): group for group in groups}.values())
            del groups
        else:
            for communicator in self._communicators:
                self.attempt(distributed.close_communicator, communicator)
        self._communicators.clear()
        self.activations = self.gradients = self.control = None  # connections close with the last reference
        self._collectives.clear()
        while self._disposable:
            dist.destroy_process_group(self._disposable.pop())


def in_order(rows: Sequence[T], members: Sequence[int]) -> list[T]:
    """What the processes of a group gathered, in the order of ``members``: torch sorts the ranks of a group."""
    return [rows[place] for place in map(sorted(members).index, members)]


def check_members(ranks: Sequence[int] | None) -> list[int]:
    """The global ranks of a pipeline: those given, or all.

    Raises:
        PipelineError: if they are not different ranks, or this process is not one of them.
    """
    world = dist.get_world_size()
    members = list(range(world)) if ranks is None else list(ranks)
    if (
        any(type(rank) is not int or not 0 <= rank < world for rank in members)
        or len(set(members)) < len(members)
        or dist.get_rank() not in members
    ):
        raise PipelineError(
            f"ranks must be different ones of the {world} there are, and include this one, {dist.get_rank()}",
            got=str(members),
            fix="make the transport on those ranks only",
        )
    return members


def _new_prefix(store: Any, watched: Sequence[int]) -> str:
    """A prefix for keys in the store, the same on all of these ranks and never used before.

    Each rank counts its pipelines with these ranks; the first to make the n-th one names it. The name is random, since
    torchrun's agent may keep the store while processes are started again.
    """
    here = f"sternway/{list(watched)}"
    number = store.add(f"{here}/{dist.get_rank()}", 1)
    return f"sternway/{store.compare_set(f'{here}/name/{number}', '', uuid.uuid4().hex).decode()}"


def _store_holder() -> tuple[str, bool]:
    """The process that holds the store, and whether it is this one."""
    if distributed.agent_holds_store():
        return "torchrun's agent", False
    return "global rank 0", dist.get_rank() == 0
