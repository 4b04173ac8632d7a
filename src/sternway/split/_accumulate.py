"""W without the engine: parts straight into the ``.grad`` of parameters that nobody watches.

On a CPU, matrix products are written down first and done after: between two of them Python then has a single call to
make, and while it sorts and checks, its own code stays in the processor's cache. A GPU is sent each as soon as it is
known, and works on it meanwhile. What a policy has packed is brought back one by one, as its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sternway.split._later import Product
from sternway.split._part import Part

_ORDINARY = (Tensor, torch.nn.Parameter)


def unwatched(parameter: Tensor) -> bool:
    """Whether ``.grad`` can be written without the engine: no Python hooks, and tensors of the ordinary kind."""
    if type(parameter) not in _ORDINARY or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    grad, dtype = parameter.grad, parameter.dtype
    if grad is None:
        return parameter.layout == torch.strided and getattr(parameter, "grad_dtype", dtype) == dtype
    return type(grad) is Tensor and grad.layout == torch.strided and grad.dtype == dtype and not grad.requires_grad


class Work:
    """Additions to ``.grad``: ``add`` does what it can at once and writes down the rest, ``do`` does that."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []  # done last first
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # plain sums, all done in one call

    def add(self, parameter: Tensor, parts: list[Part]) -> None:
        for part in parts:
            if part.is_packed:
                self._steps.append(partial(self._unpack_and_add, parameter, part))
                continue
            part.check()
            product = _product(parameter, part)
            if product is None:
                self._add_value(parameter, part)
            elif parameter.is_cpu:
                self._steps.append(product)
            else:
                product()

    def do(self) -> None:
        steps = self._steps
        while steps:
            steps.pop()()
        if self._sums:
            totals, values = zip(*self._sums.values(), strict=True)
            torch._foreach_add_(totals, values)

    def _unpack_and_add(self, parameter: Tensor, part: Part) -> None:
        part.ready()
        product = _product(parameter, part)
        if product is not None:
            product()
        else:
            self._add_value(parameter, part)

    def _add_value(self, parameter: Tensor, part: Part) -> None:
        value, total, shape = part.value(part.transposed and parameter.ndim > 1), parameter.grad, parameter.shape
        if value.shape != shape:
            value = value.sum(0) if value.shape[1:] == shape else value.sum_to_size(shape)
        if total is None:
            parameter.grad = _own(value, parameter, part)
        elif total.layout != torch.strided:  # a sparse gradient before
            parameter.grad = value + total
        elif value.dtype == total.dtype and value.layout == torch.strided and id(total) not in self._sums:
            self._sums[id(total)] = (total, value)
        else:  # one call must not write twice to one place
            total.add_(value)


def _product(parameter: Tensor, part: Part) -> Callable[[], Tensor] | None:
    """The part as a matrix product straight into ``.grad``, if it can be one."""
    total, later = parameter.grad, part.later
    if total is None or not isinstance(later, Product):
        return None
    return later.adding(total, part.grad, part.transposed)


def accumulate(parameters: list[Tensor], values: list[Tensor | tuple[Tensor, Tensor]]) -> None:
    """Add to the gradients of parameters that nobody watches values that are nobody else's, or products of two."""
    totals, added = [], []
    for parameter, value in zip(parameters, values, strict=True):
        total = parameter.grad
        if isinstance(value, tuple):
            if total is None:
                parameter.grad = _laid_out(torch.matmul(*value), parameter)
            elif total.ndim == 2:
                total.addmm_(*value)
            else:
                total.baddbmm_(*value)
        elif total is None:
            parameter.grad = _laid_out(value, parameter)
        else:
            totals.append(total)
            added.append(value)
    if totals:
        torch._foreach_add_(totals, added)


def _own(value: Tensor, parameter: Tensor, part: Part) -> Tensor:
    """``value`` as a first ``.grad``: of the parameter's type and layout, and sharing memory with nothing."""
    if value.layout != torch.strided:
        return value.clone() if part.later is None else value
    if value.untyped_storage().data_ptr() in {
        tensor.untyped_storage().data_ptr() for tensor in part.tensors() if tensor.layout == torch.strided
    }:
        value = value.clone(memory_format=torch.preserve_format)
    return _laid_out(value, parameter)


def _laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` in the parameter's type and layout, as autograd's first ``.grad`` is."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if value.dtype == parameter.dtype and (value.stride() == parameter.stride() if dense else value.is_contiguous()):
        return value
    like = torch.empty_like(parameter) if dense else torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return like.copy_(value)
