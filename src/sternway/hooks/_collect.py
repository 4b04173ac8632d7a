"""A context that collects the gradients that arrive at chosen places."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import overload

from torch import Tensor

from sternway._torch import require
from sternway.hooks._places import GradHook, Place, attach, resolve_all


class Collected(Sequence[Tensor | None]):
    """The gradients that arrived: ``collected[i]`` is the latest at place ``i``, None if none came."""

    def __init__(self, count: int) -> None:
        self._arrived: list[list[Tensor | None]] = [[] for _ in range(count)]
        self._lock = threading.Lock()

    def history(self, index: int) -> tuple[Tensor | None, ...]:
        """Every gradient that arrived at place ``index``, in order; None for an undefined one."""
        return tuple(self._arrived[index])

    def __len__(self) -> int:
        return len(self._arrived)

    @overload
    def __getitem__(self, index: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor | None]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor | None] | None:
        latest = [arrived[-1] if arrived else None for arrived in self._arrived]
        return latest[index]

    def __repr__(self) -> str:
        came = sum(bool(arrived) for arrived in self._arrived)
        return f"Collected({came} of {len(self)} places have a gradient)"

    def _hook(self, index: int) -> GradHook:
        def keep(grad: Tensor | None) -> None:
            with self._lock:
                self._arrived[index].append(grad)

        return keep


@contextmanager
def collect(places: Place | Iterable[Place]) -> Iterator[Collected]:
    """Collect the gradients that arrive at ``places`` while the block runs.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> hidden = 2 * x
        >>> with collect([hidden]) as grads:
        ...     (hidden * hidden).sum().backward()
        >>> grads[0]
        tensor([4., 4.])

    Args:
        places: tensors, ``GradientEdge``s or nodes, as for ``on_grads``. Their ``.grad`` is not touched.
    """
    require("hooks")
    resolved = resolve_all(places)
    collected = Collected(len(resolved))
    handles = [attach(place, collected._hook(index)) for index, place in enumerate(resolved)]
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()
