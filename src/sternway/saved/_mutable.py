"""In-place changes to saved tensors: what is about to be written over is copied first.

Every operation that writes says so in its schema. A dispatch mode looks at each and, before it runs, lets the slots on
the storages that it writes to take a copy. A slot stands for a whole storage at one version, so a change through any
view, or through the base, or by ``out=``, is seen, and several saved views cost one copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sternway.saved._policy import Policy
from sternway.saved._report import Report
from sternway.saved._slot import Slot, Slots


class Mutable(Policy):
    """Copies what is written over."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self._by_storage: dict[int, weakref.WeakSet[Slot]] = {}
        self._modes: list[TorchDispatchMode] = []

    def __enter__(self) -> Report:
        report = super().__enter__()
        mode = _BeforeWrites(self._before_write)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)
        return report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.pop().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        super().__exit__(kind, error, trace)

    def look_after(self, slot: Slot, tensor: Tensor) -> None:
        """Copy this slot's bytes before anything writes to the storage of ``tensor``."""
        address = tensor.untyped_storage()._cdata
        slots = self._by_storage.get(address)
        if slots is None:
            if len(self._by_storage) > 2 * len(self.slots) + 1000:
                self._by_storage = {key: kept for key, kept in self._by_storage.items() if kept}
            slots = self._by_storage[address] = weakref.WeakSet()
        slots.add(slot)

    def _before_write(self, tensor: Tensor) -> None:
        try:
            slots = self._by_storage.pop(tensor.untyped_storage()._cdata, ())
        except (RuntimeError, NotImplementedError):  # a tensor without storage is never in a slot
            return
        for slot in list(slots):
            slot.own()


class _BeforeWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, before: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written(function):
            value = args[place] if place < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                self._before(tensor)
        return function(*args, **kwargs)


@cache
def _written(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes to: place and name."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


def mutable() -> Mutable:
    """Allow in-place changes to saved tensors: what the backward needs is copied before it is written over.

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

    The change has to happen in the block; the backward may come after it. Blocks nest, and compose with the others.
    """
    return Mutable()
