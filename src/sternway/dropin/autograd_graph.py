"""``torch.autograd.graph``, by Sternway where ours is better and torch's own object where it is not.

    - from torch.autograd.graph import register_multi_grad_hook
    + from sternway.dropin.autograd_graph import register_multi_grad_hook

docs/autograd_graph.md maps each name and says what differs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from sternway import hooks
from sternway.saved import Hooks, Mutable, Packed, mutable, offload

__all__ = [
    "GradientEdge",
    "Node",
    "allow_mutation_on_saved_tensors",
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
    if mode == "any":
        tensors = [place for place in tensors if not isinstance(place, Tensor) or place.requires_grad]
    if not tensors:
        return RemovableHandle(OrderedDict())
    if mode == "any":
        return hooks.on_grads(tensors, fn, mode)
    return hooks.on_grads(tensors, lambda grads: fn(list(grads)), mode)  # type: ignore[arg-type]  # of mode "all"


class saved_tensors_hooks(_torch.saved_tensors_hooks):  # noqa: N801 - torch's name
    """A pair of pack / unpack hooks for saved tensors, as torch's; policies around it have what ``pack_hook`` returns.

    Example:
        >>> x = torch.ones(5, requires_grad=True)
        >>> with saved_tensors_hooks(lambda t: t.detach() * 10, lambda t: t / 10):
        ...     y = (x * x).sum()
        >>> y.backward()
        >>> x.grad
        tensor([2., 2., 2., 2., 2.])
    """

    def __enter__(self) -> None:
        Hooks(self.pack_hook, self.unpack_hook).__enter__()


class save_on_cpu(saved_tensors_hooks):  # noqa: N801 - torch's name
    """Keep saved tensors in the host's memory, as ``saved.offload(min_bytes=0)``; the signature is torch's.

    Parameters are not copied, storages are copied once, and copies overlap with the computation if ``pin_memory``. To
    bring tensors back by the order of the step before, make one and enter it in every step.
    """

    def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
        available = bool(getattr(torch, device_type, torch.cuda).is_available())
        self._policy = offload(min_bytes=0, pin_memory=pin_memory and available)
        self._policy.warns = False  # torch's does not
        super().__init__(self._policy.pack, Packed.unpack)

    def __enter__(self) -> None:
        self._policy.__enter__()

    def __exit__(self, *args: object) -> None:
        self._policy.__exit__(*args)  # type: ignore[arg-type]  # torch's signature


@contextmanager
def allow_mutation_on_saved_tensors() -> Iterator[Mutable]:
    """Allow in-place changes to saved tensors in this block: ``saved.mutable``."""
    policy = mutable()
    with policy:
        yield policy
