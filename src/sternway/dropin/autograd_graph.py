"""``torch.autograd.graph``, by Sternway where ours is better and torch's own object where it is not.

    - from torch.autograd.graph import register_multi_grad_hook
    + from sternway.dropin.autograd_graph import register_multi_grad_hook

docs/autograd_graph.md maps each name and says what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import graph as _torch
from torch.autograd.graph import (
    GradientEdge,
    Node,
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    get_gradient_edge,
    increment_version,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.hooks import RemovableHandle

from sternway.hooks._on_grads import watch
from sternway.hooks._places import resolve

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
