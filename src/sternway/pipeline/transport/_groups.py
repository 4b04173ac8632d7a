"""The process groups of a pipeline over torch.distributed, and what happens to them when a rank is lost.

A pipeline has three groups of its own: for activations, for gradients, and for control. A rank that fails says why
through the store (``faults/_watch.py``) and closes its groups; whoever waits for it is woken by the closed connection,
reads the store, and does the same. A rank that says nothing is missed after a while; then those that wait for it have
their own connections cut.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from sternway._torch import distributed
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline.faults import _sockets
from sternway.pipeline.faults._lost import LostRank
from sternway.pipeline.faults._watch import Watch


class ProcessGroups:
    """The groups of one pipeline on one rank. The arguments are those of ``DistTransport``.

    Attributes:
        rank: this process's place among ``members``.
        watch: finds lost ranks; None if there is nothing to watch.
    """

    def __init__(
        self,
        members: list[int],
        device: torch.device,
        timeout: float,
        heartbeat_timeout: float,
        watched: Sequence[int],
    ) -> None:
        self.members, self.device, self.rank = members, device, members.index(dist.get_rank())
        self.watch: Watch | None = None
        self._timeout = timedelta(seconds=timeout)
        self._sockets: _sockets.Sockets = frozenset()
        self._disposable: list[Any] = []
        self.activations: Any = self.new(members)
        self.gradients: Any = self.new(members)
        self.control: Any = self.new(members)
        self._subgroups: dict[tuple[int, ...], Any] = {tuple(range(len(members))): self.control}
        store = distributed.default_store()
        self._store_port = distributed.store_port(store)
        self.store = PrefixStore(f"sternway/{self.control.group_name}", store)
        if heartbeat_timeout and len(watched) > 1:
            self.watch = Watch(
                store,
                _new_prefix(store, watched),
                list(watched).index(dist.get_rank()),
                len(watched),
                heartbeat_timeout,
                *_store_holder(),
                self.wake,
            )

    def new(self, members: Sequence[int], backend: str | None = None) -> Any:
        """A new group of these global ranks. If that is not all processes, only its members make it.

        torch names such a group after its members, and a new group of the same name finds in the store what the old one
        left there. So these groups are not destroyed while the process runs.
        """
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        before = _sockets.opened()
        some = len(members) < dist.get_world_size()
        group = dist.new_group(list(members), self._timeout, backend, use_local_synchronization=some)
        if not some:
            self._disposable.append(group)
        self._sockets |= _sockets.opened() - before
        return group

    def of_ranks(self, ranks: Sequence[int]) -> Any:
        """The group of some of the pipeline's ranks, made once."""
        key = tuple(ranks)
        if key not in self._subgroups:
            self._subgroups[key] = self.new([self.members[rank] for rank in key])
        return self._subgroups[key]

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call something that needs the other ranks. If a connection is lost, say which rank was."""
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise self.explain(error) from None

    def explain(self, error: Exception) -> LostRankError:
        """The error to raise after a connection was lost."""
        lost = self.watch.cause() if self.watch is not None else LostRank(None, str(error))
        return lost.error(self.rank)

    def wake(self) -> None:
        """Cut the connections of all groups, so that threads that wait on them wake up."""
        _sockets.cut(self._sockets, self._store_port)
        if self.device.type == "cuda":  # NCCL's groups can be aborted from another thread
            for group in (self.activations, self.gradients, self.control):
                distributed.abort_group(group)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's error, unless it is about the loss of another."""
        if self.watch is not None and not isinstance(error, LostRankError):
            self.watch.tell(f"{type(error).__name__}: {error}")

    def close(self, failed: bool = False) -> None:
        """Stop watching, and destroy the groups: those of all processes, or after a failure all of them."""
        if self.watch is not None:
            self.watch.stop()
        if failed:
            groups = (self.activations, self.gradients, self.control, *self._subgroups.values())
            self._disposable = list({id(group): group for group in groups}.values())
            del groups
        self.activations = self.gradients = self.control = None  # connections close with the last reference
        self._subgroups.clear()
        while self._disposable:
            dist.destroy_process_group(self._disposable.pop())


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
