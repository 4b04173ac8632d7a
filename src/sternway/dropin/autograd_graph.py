"""``torch.autograd.graph``, by Sternway where ours is better and torch's own object where it is not.

    - from torch.autograd.graph import register_multi_grad_hook
    + from sternway.dropin.autograd_graph import register_multi_grad_hook

docs/autograd_graph.md maps each name and says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import graph as _torch
from torch.autograd.graph import (
    GradientEdge,
    Node,
    get_gradient_edge,
    increment_version,
)
from torch.utils.hooks import RemovableHandle

from sternway.hooks._on_grads import watch
from sternway.hooks._places import resolve
from sternway.saved import Hooks, Mutable, Offload, forbid, mutable
from sternway.saved._offload import to_host

__all__ = [
    "GradientEdge",
    "Node",
    "allow_mutation_on_saved_tensors",
    "disable_saved_tensors_hooks",
    "get_gradient_edge",
    "increment_version",
    "register_multi_grad_hook",
    "save_on_cpu",
    "saved_tensors_hooks",
]
__all__ += sorted(set(_torch.__all__) - set(__all__))  # what this release of torch has beside: as it is there


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(_torch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_multi_grad_hook(
    tensors: Sequence[torch.Tensor],
    fn: Callable[[Sequence[torch.Tensor | None]], None] | Callable[[torch.Tensor], None],
    *,
    mode: Literal["all", "any"] = "all",
) -> RemovableHandle:
    """Call ``fn`` once per backward with the gradients of ``tensors``, as ``hooks.on_grads``; the signature is torch's.

    Example:
        >>> a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> handle = register_multi_grad_hook((a, b), lambda grads: print(grads))
        >>> torch.autograd.grad((2 * a + 3 * b).sum(), (a, b))
        [tensor([2.]), tensor([3.])]
        (tensor([2.]), tensor([3.]))

    As torch does, "all" passes a list, "any" passes over tensors that require no gradient, and a mode that is neither
    is a ``ValueError``.
    """
    if mode not in ("all", "any"):
        raise ValueError(f"Expects mode to be one of ('all', 'any') but got {mode}")
    places = [
        resolve(place, f"tensors[{index}]")
        for index, place in enumerate(tensors)
        if mode == "all" or not isinstance(place, Tensor) or place.requires_grad
    ]
    if mode == "any":
        return watch(places, fn, mode)
    return watch(places, lambda grads: fn(list(grads)), mode)  # type: ignore[arg-type]  # the mode says which fn it is


class saved_tensors_hooks(Hooks):  # noqa: N801 - torch's name
    """A pair of pack / unpack hooks for saved tensors; the policies around it have what ``pack_hook`` returns.

    Example:
        >>> x = torch.ones(5, requires_grad=True)
        >>> with saved_tensors_hooks(lambda t: t.detach() * 10, lambda t: t / 10):
        ...     y = (x * x).sum()
        >>> y.backward()
        >>> x.grad
        tensor([2., 2., 2., 2., 2.])
    """

    def __enter__(self) -> None:  # type: ignore[override]  # torch's gives nothing
        super().__enter__()


class save_on_cpu:  # noqa: N801 - torch's name
    """Keep saved tensors in the host's memory, as ``saved.offload(min_bytes=0)``; the signature is torch's.

    Parameters are not copied, storages are copied once, and copies overlap with the computation if ``pin_memory``. To
    bring tensors back by the order of the step before, make one and enter it in every step.
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        available = bool(getattr(torch, device_type, torch.cuda).is_available())
        self._policy: Offload = to_host(pinned=pin_memory and available)

    def __enter__(self) -> None:
        self._policy.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._policy.__exit__(kind, error, trace)


@contextmanager
def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
    """Refuse saved-tensor hooks in this block with a ``RuntimeError`` that says ``error_message``; ``saved.forbid``."""
    with forbid(error_message):
        yield


@contextmanager
def allow_mutation_on_saved_tensors() -> Iterator[Mutable]:
    """Allow in-place changes to saved tensors in this block: ``saved.mutable``."""
    policy = mutable()
    with policy:
        yield policy
