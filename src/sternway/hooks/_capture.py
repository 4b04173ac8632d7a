"""A context that collects the gradients at chosen places."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from sternway.errors import HookError
from sternway.hooks._places import GradHook, attach, resolve


class Captured(Sequence[Tensor | None]):
    """The gradients that arrived: ``captured[i]`` is the latest at place ``i``, None if none came."""

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
        return f"Captured({came} of {len(self)} places have a gradient)"

    def _hook(self, index: int) -> GradHook:
        def keep(grad: Tensor | None) -> None:
            with self._lock:
                self._arrived[index].append(grad)

        return keep


@contextmanager
def capture(
    places: Tensor | GradientEdge | Node | Iterable[Tensor | GradientEdge | Node],
) -> Iterator[Captured]:
    """Collect the gradients that arrive at ``places`` while the block runs.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> hidden = 2 * x
        >>> with capture([hidden]) as grads:
        ...     (hidden * hidden).sum().backward()
        >>> grads[0]
        tensor([4., 4.])

    Args:
        places: tensors, ``GradientEdge``s or nodes, as for ``on_grads``. Their ``.grad`` is not touched.
    """
    single = isinstance(places, Tensor | GradientEdge | Node)
    listed: list[Any] = [places] if single else list(places)  # type: ignore[arg-type]  # not single: iterable
    if not listed:
        raise HookError("a capture needs at least one place", got="none", fix="pass tensors, edges or nodes")
    resolved = [resolve(place, f"places[{index}]") for index, place in enumerate(listed)]
    captured = Captured(len(resolved))
    handles = [attach(place, captured._hook(index)) for index, place in enumerate(resolved)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
