"""Tensors and their storages: versions, views, and kernels that have no public name.

Attributes are read by ``attrgetter``, which costs no Python frame: some are read for every node of a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from sternway._torch.probe import probe


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was changed in place; 0 for one of inference mode, which does not count that."""
    try:
        return tensor._version
    except RuntimeError:
        if tensor.is_inference():
            return 0
        raise


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a differentiable view shows."""


ORDINARY = (Tensor, torch.nn.Parameter)
"""The types of tensors that no subclass has a say in."""


def needs_grad(tensor: Tensor) -> bool:
    """``tensor.requires_grad``, of a subclass too that refuses to be read."""
    if type(tensor) in ORDINARY:
        return tensor.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def grad_of(tensor: Tensor) -> Tensor | None:
    """``tensor.grad``, of a subclass too that refuses to be read."""
    if type(tensor) in ORDINARY:
        return tensor.grad
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad


def detached(tensor: Tensor) -> Tensor:
    """``tensor.detach()``, as autograd's own code has it: a subclass that only says what functions do is left off."""
    if type(tensor) in ORDINARY:
        return tensor.detach()
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def layout_enforced() -> bool:
    """Whether a first ``.grad`` must have its parameter's strides: ``torch.autograd.enforce_grad_layout_policy``."""
    asked = getattr(torch._C, "_is_grad_layout_enforcement_enabled", None)  # torch 2.13 and later
    return asked is None or asked()


is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd follows the tensor as a view of another."""


storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Which storage this is; another one has another number while this one lives."""


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether a tensor stands for zeros without memory, as autograd makes for gradients that are known to be zero."""
    return tensor._is_zerotensor()


def storage_id(tensor: Tensor) -> int:
    """Which storage a tensor has; another storage has another number while this one lives."""
    return tensor.untyped_storage()._cdata


def storage_uses(tensor: Tensor) -> int:
    """How many tensors and graphs hold a tensor's storage."""
    return int(torch._C._storage_Use_Count(storage_id(tensor)))


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor, coalesced or not."""
    return tensor._indices(), tensor._values()


def without_torch_function() -> AbstractContextManager[Any]:
    """A block in which subclasses of Tensor are not asked."""
    return torch._C.DisableTorchFunction()


def without_autocast() -> AbstractContextManager[Any]:
    """A block in which nothing is cast, as compiled code was compiled."""
    return torch._C._DisableAutocast()


def add_each(totals: list[Tensor], values: list[Tensor]) -> None:
    """``total += value`` for each pair, in few kernels."""
    torch._foreach_add_(totals, values)


def zero_each(tensors: list[Tensor]) -> None:
    """``tensor.zero_()`` for each, in few kernels."""
    torch._foreach_zero_(tensors)


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """``tensor *= factor`` for each, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def conjugate_view(tensor: Tensor) -> Tensor:
    """A view that is read as the conjugate; nothing is computed."""
    return torch._conj(tensor)


def negative_view(tensor: Tensor) -> Tensor:
    """A view that is read as the negative; nothing is computed."""
    return torch._neg_view(tensor)


def lazy_copy(tensor: Tensor) -> Tensor:
    """A copy that shares memory until one of the two is written."""
    return torch._lazy_clone(tensor)


@probe("Tensor._version", expected="counts in-place changes", features=("split", "saved", "hooks", "graph"))
def _version() -> bool:
    tensor = torch.zeros(1)
    before = version_of(tensor)
    with torch.inference_mode():
        uncounted = torch.zeros(1)
    return version_of(tensor.add_(1)) == before + 1 == version_of(tensor.detach()) and version_of(uncounted) == 0


@probe("Tensor._base, Tensor._is_view", expected="lead from a view to what it shows", features=("split", "saved"))
def _views() -> bool:
    tensor = torch.ones(2)
    view = tensor[:1]
    return is_view(view) and base_of(view) is tensor and not is_view(tensor) and base_of(tensor) is None


@probe(
    "UntypedStorage._cdata, torch._C._storage_Use_Count",
    expected="tell storages apart and count who holds one",
    features=("saved", "graph", "pipeline", "split.capture"),
)
def _storages() -> bool:
    tensor = torch.ones(2)
    before = storage_uses(tensor)
    view = tensor[:1]
    return storage_id(view) == storage_id(tensor) != storage_id(torch.ones(2)) and storage_uses(tensor) == before + 1


@probe("Tensor._indices, Tensor._values", expected="are the parts of a COO tensor", features=("split", "graph"))
def _sparse() -> bool:
    indices, values = sparse_parts(torch.tensor([0.0, 2.0, 3.0]).to_sparse())
    return indices.tolist() == [[1, 2]] and values.tolist() == [2.0, 3.0]


@probe("torch._C.DisableTorchFunction", expected="keeps subclasses from being asked", features=("graph",))
def _torch_function() -> bool:
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError("asked")

    tensor = torch.ones(1).as_subclass(Refusing)
    with without_torch_function():
        return tensor.add(1).shape == (1,)


@probe("torch._C._DisableAutocast", expected="switches autocast off for a block", features=("split.compiled",))
def _autocast() -> bool:
    matrix = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast():
        return (matrix @ matrix).dtype is torch.float32


@probe(
    "torch._foreach_add_, torch._foreach_mul_, torch._foreach_zero_",
    expected="change each tensor of a list in place",
    features=("split", "pipeline"),
)
def _foreach() -> bool:
    totals = [torch.ones(1), torch.ones(2)]
    add_each(totals, [torch.ones(1), torch.ones(2)])
    scale_each(totals, torch.tensor(3.0))
    found = [total.tolist() for total in totals]
    zero_each(totals)
    return found == [[6.0], [6.0, 6.0]] and [total.tolist() for total in totals] == [[0.0], [0.0, 0.0]]


@probe("torch._conj, torch._neg_view", expected="are views, with the bit set", features=("saved",))
def _lazy_views() -> bool:
    tensor = torch.tensor([1 + 2j])
    conjugate, negative = conjugate_view(tensor), negative_view(tensor)
    return (
        conjugate.is_conj()
        and negative.is_neg()
        and storage_id(conjugate) == storage_id(tensor) == storage_id(negative)
        and conjugate.tolist() == [1 - 2j]
        and negative.tolist() == [-1 - 2j]
    )


@probe("torch._lazy_clone", expected="copies no later than when one of the two is written", features=("state",))
def _lazy_clone() -> bool:
    tensor = torch.ones(2)
    copy = lazy_copy(tensor)
    copy.add_(1)
    return tensor.tolist() == [1.0, 1.0] and copy.tolist() == [2.0, 2.0]


@probe("Tensor._is_zerotensor", expected="tells zeros that have no memory", features=("split",))
def _zero_tensor() -> bool:
    leaf = torch.ones(2, requires_grad=True)
    (zeros,) = torch.autograd.grad(leaf.sgn().sum(), leaf)
    return is_zero_tensor(zeros) and not is_zero_tensor(torch.zeros(2)) and not is_zero_tensor(torch.zeros_like(zeros))


@probe(
    "torch._C._is_grad_layout_enforcement_enabled",
    expected="follows torch.autograd.enforce_grad_layout_policy, where torch has that",
    features=("split",),
)
def _layout() -> bool:
    policy: Any = getattr(torch.autograd, "enforce_grad_layout_policy", None)
    if policy is None:
        return layout_enforced()
    with policy(False):
        relaxed = not layout_enforced()
    return relaxed and layout_enforced()
