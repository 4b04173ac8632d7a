"""The process groups of a pipeline over torch.distributed: what concerns all ranks, and what follows when one is lost.

Three groups of the pipeline's own: activations, gradients, and whatever concerns all ranks. A rank that cannot go on
says why through the store (``_watch.py``) and closes its groups; whoever waits for it is woken by the closed
connection, reads the store, and does the same. A rank that says nothing is missed after a while, and those that wait
for it have their own connections cut.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from sternway.errors import LostRankError, PipelineError
from sternway.pipeline._crew import Crew
from sternway.pipeline._sockets import Sockets, cut, opened
from sternway.pipeline._transport import Transport, device_of
from sternway.pipeline._watch import Loss, Watch

_PINGS = 9


class GroupTransport(Transport):
    """Everything of ``DistTransport`` but the messages; its arguments are the same."""

    def __init__(
        self,
        ranks: Sequence[int] | None,
        device: torch.device | str,
        timeout: float,
        heartbeat_timeout: float,
        watched: Sequence[int] | None,
    ) -> None:
        for name, value in (("timeout", timeout), ("heartbeat_timeout", heartbeat_timeout)):
            if not isinstance(value, int | float) or not 0 <= value < 1e6 or (name == "timeout" and value == 0):
                raise PipelineError(f"{name} is a number of seconds", got=repr(value), fix=f"pass {name}=30")
        if not dist.is_initialized():
            raise PipelineError(
                "a pipeline over several processes needs torch.distributed",
                got="no process group",
                fix="start with torchrun and call torch.distributed.init_process_group(), or pass LocalTransport()",
            )
        self.members = _members(ranks)
        self.device = device_of(device)
        self.ranks, self.rank = len(self.members), self.members.index(dist.get_rank())
        self.mine = (self.rank,)
        self._timeout = timedelta(seconds=timeout)
        self._disposable: list[Any] = []
        self._sockets: Sockets = frozenset()
        self._groups = {name: self._new_group(self.members) for name in ("activations", "gradients", "control")}
        store = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"sternway/{self._groups['control'].group_name}", store)
        self._mistakes = 0
        self._watched = list(watched or self.members)
        if heartbeat_timeout and len(self._watched) > 1:
            # The n-th pipeline of these ranks on each of them, as each counts for itself; and a name that no pipeline
            # had before, even if torchrun's agent kept the store while processes were started again.
            here = f"sternway/{self._watched}"
            number = store.add(f"{here}/{dist.get_rank()}", 1)
            name = store.compare_set(f"{here}/name/{number}", "", uuid.uuid4().hex).decode()
            place = self._watched.index(dist.get_rank())
            holder, holds = _holder()
            self.watch = Watch(
                store, f"sternway/{name}", place, len(self._watched), heartbeat_timeout, holder, holds, self.wake
            )
        self._subgroups: dict[tuple[int, ...], Any] = {tuple(range(self.ranks)): self._groups["control"]}

    # All ranks at once

    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        mine = torch.tensor(numbers[0], dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._try(dist.all_gather, rows, mine, group=self._groups["control"])
        return [row.tolist() for row in rows]

    def delay(self, nbytes: int) -> float:
        """Half of the way there and back between the first two ranks: the median of several."""
        message = torch.zeros(max(1, nbytes), dtype=torch.uint8, device=self.device)
        group, found = self._groups["activations"], []
        for _ in range(_PINGS if self.ranks > 1 and self.rank < 2 else 0):
            there, start = self.members[1 - self.rank], time.perf_counter()
            for is_send in (self.rank == 0, self.rank == 1):
                work = self._try(dist.isend if is_send else dist.irecv, message, there, group=group)
                self._try(work.wait)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            found.append((time.perf_counter() - start) / 2)
        return self.gather([[statistics.median(found or [0.0])]])[0][0]

    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        group = self._subgroup(ranks)
        for tensor in tensors:
            self._try(dist.all_reduce, tensor, group=group)

    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        self._try(dist.broadcast, tensor, self.members[source], group=self._subgroup(ranks))

    def _subgroup(self, ranks: Sequence[int]) -> Any:
        key = tuple(ranks)
        if key not in self._subgroups:
            members = [self.members[rank] for rank in key]
            self._subgroups[key] = self._new_group(members)
        return self._subgroups[key]

    def _new_group(self, members: list[int], backend: str | None = None) -> Any:
        """A group of one's own. If it is not of all processes, only its members may be asked to make it.

        torch names such a group after its members, and a new group finds what one of the same name left in the store;
        so these are not destroyed while the process goes on.
        """
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        before = opened()
        some = len(members) < dist.get_world_size()
        group = dist.new_group(members, self._timeout, backend, use_local_synchronization=some)
        if not some:
            self._disposable.append(group)
        self._sockets |= opened() - before
        return group

    # Failure

    def _try(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Whatever needs the other ranks; if the connection is lost, their own words on why."""
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise self.explain(error) from None

    def explain(self, error: Exception) -> LostRankError:
        loss = self.watch.cause() if self.watch is not None else Loss(None, str(error))
        return LostRankError(
            "all ranks finish a step",
            got=str(loss) if loss.rank is not None else f"on rank {self.rank}, {loss.what}",
            fix="mend the cause on that rank, or look at its output; then go on from the last checkpoint",
        )

    def fail(self, error: BaseException) -> None:
        if self.watch is not None and not isinstance(error, LostRankError):
            self.watch.tell(f"{type(error).__name__}: {error}")
        self._disposable = list({id(g): g for g in (*self._groups.values(), *self._subgroups.values())}.values())
        self.close()

    def wake(self) -> None:
        """Cut the connections of the pipeline's groups, so that whoever waits on them wakes."""
        cut(self._sockets)
        if self.device.type == "cuda":  # NCCL's groups can be ended from another thread
            for group in self._groups.values():
                group.abort()

    def crew(self) -> Crew:
        return Crew(self._groups["control"], self.explain)

    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        return Crew(self._new_group(list(members or self.members), "gloo"), self.explain)

    def group_like(self, group: Any) -> Any:
        return self._new_group(dist.get_process_group_ranks(group))

    def close(self) -> None:
        if self.watch is not None:
            self.watch.stop()
        self._groups.clear()
        self._subgroups.clear()
        while self._disposable:
            dist.destroy_process_group(self._disposable.pop())


def _members(ranks: Sequence[int] | None) -> list[int]:
    world = dist.get_world_size()
    members = list(range(world)) if ranks is None else list(ranks)
    if (
        any(type(rank) is not int or not 0 <= rank < world for rank in members)
        or len(set(members)) < len(members)
        or dist.get_rank() not in members
    ):
        raise PipelineError(
            f"a pipeline's ranks are different ones of {world}, and {dist.get_rank()}, which asks, is one of them",
            got=str(members),
            fix="call it on those ranks only",
        )
    return members


def _holder() -> tuple[str, bool]:
    """Who holds the store, and whether it is this process."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun's agent", False
    return "rank 0 of all", dist.get_rank() == 0
