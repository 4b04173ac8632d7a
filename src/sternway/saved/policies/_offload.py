"""Move saved tensors to the host's memory or to disk, and bring them back for the backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

from sternway._bytes import parse_bytes, show_bytes
from sternway._storage import storage_sizes
from sternway._torch.tensors import storage_id
from sternway.errors import SavedError
from sternway.saved._offloader import Offloader
from sternway.saved._policy import Policy, active
from sternway.saved._report import Report
from sternway.saved._slot import Slots
from sternway.saved.stores._disk import DiskStore
from sternway.saved.stores._host import HostStore
from sternway.saved.stores._pool import half_of_memory
from sternway.saved.stores._store import Store

_MEND = {
    "small": "pass a smaller min_bytes, such as 0",
    "already there": 'pass to="disk": these tensors are in host memory already',
    "elsewhere": "pass where= that matches names of modules which save tensors",
}


class Offload(Policy):
    """Moves saved tensors to a store."""

    def __init__(
        self,
        offloader: Offloader,
        where: str | Iterable[str] | None = None,
        min_bytes: int | str = 0,
        model: nn.Module | None = None,
        *,
        anywhere: bool = False,
    ) -> None:
        super().__init__(where, min_bytes, model)
        self.offloader = offloader
        self.slots = Slots()
        self.warns = False  # once, if a block moves nothing
        self._anywhere = anywhere  # also from the host to the host: for tests
        self._spared: frozenset[int] = frozenset()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        stack = active()
        super().__exit__(kind, error, trace)
        if self.warns and kind is None and stack is not None:
            self._say_if_idle(stack.report)

    def _say_if_idle(self, report: Report) -> None:
        """After the first block that saved something: warn if nothing of it is moved, for a reason one can mend."""
        skipped = report.only_skipped()
        self.warns = report.is_empty
        why = max((reason for reason in skipped if reason in _MEND), key=skipped.__getitem__, default=None)
        if why is not None:
            text = ", ".join(f"{reason} {show_bytes(size)}" for reason, size in skipped.items())
            warnings.warn(f"saved.offload moved nothing; skipped: {text}. Fix: {_MEND[why]}", stacklevel=3)

    def put_away(self) -> None:
        """Have by now off the device what is to go: whatever is computed from now on waits for the copies."""
        self.offloader.put_away()

    def bring_back(self) -> None:
        """Start to bring back all that is away. Without it, that happens on use, or ``prefetch`` bytes ahead."""
        self.offloader.bring_back()

    def spare(self, tensors: Iterable[Tensor]) -> None:
        """In the next blocks, leave alone what shares a storage with these: they are kept on the device anyway."""
        self._spared = frozenset(storage_sizes(tensors))

    def spares(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device anyway."""
        return bool(self._spared) and storage_id(tensor) in self._spared

    def rate(self, device: torch.device) -> float:
        """Bytes per second between a device and the store, measured now; the slower of the two directions."""
        return min(self.offloader.store.rates(device))

    def close(self) -> None:
        """End the store's threads, and remove its buffers and files. The policy cannot be entered again."""
        self.offloader.store.close()

    def is_there(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the store's memory already."""
        return self.offloader.store.name == tensor.device.type and not self._anywhere

    def _opened(self) -> None:
        self.offloader.opened()

    def _closed(self, failed: bool) -> None:
        self.offloader.closed(failed)


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
    pin_memory: bool | None = None,
    model: nn.Module | None = None,
) -> Offload:
    """Move saved tensors off the device while the forward goes on, and bring them back before they are used.

    Gradients are bit-identical to those without the policy. A storage is moved once however many tensors share it;
    parameters, buffers, their views and other leaves are never moved.

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
        prefetch: how many bytes may be on their way back before they are used; 0 for none.
        min_bytes: smaller storages stay. If all do, the first block warns.
        where: patterns for the names of the modules whose tensors are moved; all, unless given.
        directory: for "disk", where to make a temporary folder. It is removed when it is empty and no block is open, at
            exit, or, if the process was killed, by the next policy that uses the directory.
        buffer: how many bytes may wait to be copied, or written, before the forward waits.
        pool: for "cpu", how much host memory may be in use; half of the machine's, unless given. What does not fit
            stays on the device.
        pin_memory: for "cpu", whether host memory is page-locked, which copies beside the computation need; if CUDA is
            available, unless given.
        model: the model whose names ``where`` means; the outermost module that is called, unless given.

    Returns:
        A policy: a context manager that gives a ``Report``. Make it once and enter it in every step: it learns from
        each step for the next.

    Raises:
        SavedError: an option has a wrong value; in a block, the disk is full.
    """
    window = parse_bytes(buffer, "buffer", SavedError)
    limit = half_of_memory() if pool is None else parse_bytes(pool, "pool", SavedError)
    store: Store
    if to == "disk":
        if directory is None:
            raise SavedError('to="disk" needs a directory', got="none", fix="pass directory=")
        store = DiskStore(Path(directory), window)
    elif to == "cpu":
        if directory is not None:
            raise SavedError(
                'to="cpu" cannot use a directory',
                got=f"directory={str(directory)!r}",
                fix='pass to="disk", or leave it out',
            )
        store = HostStore(limit, pinned=torch.cuda.is_available() if pin_memory is None else pin_memory)
    else:
        raise SavedError('to must be "cpu" or "disk"', got=repr(to), fix="pass one of the two")
    offloader = Offloader(store, _budget(budget), parse_bytes(prefetch, "prefetch", SavedError), window)
    policy = Offload(offloader, where, min_bytes, model)
    policy.warns = True
    return policy


def _budget(budget: int | float | str) -> int | float | str:
    if budget == "auto":
        return budget
    if isinstance(budget, float):
        if not 0 <= budget <= 1:
            raise SavedError(
                "a budget that is a fraction must be between 0 and 1",
                got=repr(budget),
                fix='pass 0.5, or bytes as "4GiB"',
            )
        return budget
    return parse_bytes(budget, "budget", SavedError)
