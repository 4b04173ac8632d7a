"""Allow in-place changes to saved tensors: what is about to be written over is copied first.

Every operator that writes says so in its schema. A dispatch mode looks at each operator and, before it runs, makes the
slots on the storages that it writes to take a copy. A slot stands for a whole storage at one version, so a change
through any view, through the base or by ``out=`` is seen, and several saved views cost one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from sternway._torch import require
from sternway._torch.saved_hooks import intercept, written_arguments
from sternway._torch.tensors import storage_id
from sternway.saved._policy import Policy
from sternway.saved._slot import Slot, Slots


class Mutable(Policy):
    """Copies saved tensors before they are written over."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self._by_storage: dict[int, weakref.WeakSet[Slot]] = {}
        self._modes: list[AbstractContextManager[Any]] = []

    def _opened(self) -> None:
        mode = intercept(self._run)
        mode.__enter__()
        self._modes.append(mode)

    def _closed(self, failed: bool) -> None:
        self._modes.pop().__exit__(None, None, None)

    def _run(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for position, name in written_arguments(operator):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                self._before_write(tensor)
        return operator(*args, **kwargs)

    def look_after(self, slot: Slot, tensor: Tensor) -> None:
        """Copy this slot's bytes before anything writes to the storage of ``tensor``."""
        address = storage_id(tensor)
        slots = self._by_storage.get(address)
        if slots is None:
            if len(self._by_storage) > 2 * len(self.slots) + 1000:
                self._by_storage = {key: kept for key, kept in self._by_storage.items() if kept}
            slots = self._by_storage[address] = weakref.WeakSet()
        slots.add(slot)

    def _before_write(self, tensor: Tensor) -> None:
        try:
            slots = self._by_storage.pop(storage_id(tensor), ())
        except (RuntimeError, NotImplementedError):  # a tensor without storage is never in a slot
            return
        for slot in list(slots):
            slot.own()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def mutable() -> Mutable:
    """Allow in-place changes to saved tensors: they are copied before they are written over.

    Example:
        >>> from sternway import saved
        >>> x = torch.ones(3, requires_grad=True)
        >>> with saved.mutable():
        ...     y = x * 2
        ...     loss = (y**2).sum()
        ...     _ = y.zero_()
        >>> loss.backward()
        >>> x.grad
        tensor([8., 8., 8.])

    The change must happen in the block; the backward may come after it. Blocks nest, also with other policies.
    """
    require("saved.mutable")
    return Mutable()
