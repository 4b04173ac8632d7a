"""What is saved goes to the host's memory or to disk, and comes back for the backward."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from sternway._bytes import parse_bytes
from sternway.errors import SavedError
from sternway.saved._disk import DiskStore
from sternway.saved._engine import Engine
from sternway.saved._policy import Policy
from sternway.saved._pool import half_of_memory
from sternway.saved._slot import Slots
from sternway.saved._store import HostStore, Store


class Offload(Policy):
    """Moves saved tensors to a store."""

    def __init__(
        self,
        engine: Engine,
        where: str | Iterable[str] | None = None,
        min_bytes: int | str = 0,
        model: nn.Module | None = None,
        *,
        anywhere: bool = False,
    ) -> None:
        super().__init__(where, min_bytes, model)
        self.engine = engine
        self.slots = Slots()
        self._anywhere = anywhere  # also from the host to the host: for tests of the engine

    def is_there(self, tensor: Tensor) -> bool:
        """Whether the tensor lies where it would be moved to."""
        return self.engine.store.name == tensor.device.type and not self._anywhere

    def _opened(self) -> None:
        self.engine.opened()

    def _closed(self, failed: bool) -> None:
        self.engine.closed(failed)


def offload(
    *,
    to: Literal["cpu", "disk"] = "cpu",
    budget: int | float | str = 0,
    prefetch: int | str = "1GiB",
    min_bytes: int | str = "1MiB",
    where: str | Iterable[str] | None = None,
    directory: str | Path | None = None,
    buffer: int | str = "1GiB",
    pool: int | str | None = None,
    model: nn.Module | None = None,
) -> Offload:
    """Move saved tensors off the device while the forward goes on, and bring them back ahead of their use.

    Gradients are those of keeping, bit for bit. A storage is moved once however many tensors share it; parameters,
    buffers, their views and other leaves are never moved.

    Example:
        >>> import tempfile
        >>> from sternway import saved
        >>> policy = saved.offload(to="disk", directory=tempfile.gettempdir(), min_bytes=0)    # once
        >>> layer = torch.nn.Linear(8, 8)
        >>> for step in range(3):
        ...     with policy as report:
        ...         loss = layer(torch.randn(4, 8)).relu().sum()
        ...     loss.backward()
        >>> report.moved_bytes
        256

    Args:
        to: the host's memory, "cpu", or "disk".
        budget: how much may stay on the device: bytes, text such as "4GiB", a fraction of what a step saves, or
            "auto": as little as costs no time, found by timing the first two steps, in which nothing is moved. For
            "auto" steps must be alike.
        prefetch: how many bytes may be on their way back before they are asked for; 0 for none.
        min_bytes: smaller storages stay.
        where: patterns for the names of the modules whose tensors are moved; all, unless given.
        directory: for "disk", where to make a folder of our own. It is removed when it is empty and no block is open,
            at exit, or, if the process was killed, by the next policy on that directory.
        buffer: how many bytes may wait to be copied, or written, before the forward waits.
        pool: how much page-locked memory may be in use; half of the machine's memory, unless given. What does not fit
            stays on the device.
        model: whose names ``where`` means; the outermost module that is called, unless given.

    Returns:
        A policy: a context manager that gives a ``Report``. Make it once and enter it in every step: it learns.

    Raises:
        SavedError: options that make no sense; in a block, a disk that is full.
    """
    window = parse_bytes(buffer, "buffer", SavedError)
    limit = half_of_memory() if pool is None else parse_bytes(pool, "pool", SavedError)
    store: Store
    if to == "disk":
        if directory is None:
            raise SavedError('to="disk" is told where', got="no directory", fix="pass directory=")
        store = DiskStore(Path(directory), window)
    elif to == "cpu":
        if directory is not None:
            raise SavedError('a directory is for to="disk"', got=f'to="cpu" and directory={str(directory)!r}')
        store = HostStore(limit, pinned=torch.cuda.is_available())
    else:
        raise SavedError("tensors go to the cpu or to disk", got=repr(to), fix='pass "cpu" or "disk"')
    engine = Engine(store, _budget(budget), parse_bytes(prefetch, "prefetch", SavedError), window)
    return Offload(engine, where, min_bytes, model)


def _budget(budget: int | float | str) -> int | float | str:
    if budget == "auto":
        return budget
    if isinstance(budget, float):
        if not 0 <= budget <= 1:
            raise SavedError("a budget that is a fraction is between 0 and 1", got=repr(budget), fix="pass one")
        return budget
    return parse_bytes(budget, "budget", SavedError)


def to_host(pinned: bool) -> Offload:
    """Everything to the host's memory, page-locked or not: what ``save_on_cpu`` asks for."""
    store = HostStore(half_of_memory(), pinned=pinned)
    return Offload(Engine(store, 0, parse_bytes("1GiB", "prefetch", SavedError), parse_bytes("1GiB", "buffer")))
