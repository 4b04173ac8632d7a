"""Call the hooks of a mark with the gradients that have arrived, and use what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway._torch.tensors import lazy_copy
from sternway.errors import StateError
from sternway.state._load import Mark, Running


def run(mark: Mark, grad: Tensor) -> Tensor:
    """The gradient after the mark's functions, each of which gets what the one before it returned."""
    with Running(mark):
        for fn in tuple(mark.fns):
            grad = _replaced(fn(_lent(grad)), grad)
    return grad


def run_together(mark: Mark, grad: Tensor, index: int) -> Tensor:
    """One of several gradients that have all arrived, after functions that get all of them."""
    if mark.given is None:
        grads, mark.arrived, mark.given = mark.arrived, {}, {}
        with Running(mark):
            for fn in tuple(mark.fns):
                returned = fn({place: _lent(grad) for place, grad in grads.items()}) or {}
                mark.given |= {place: new for place, new in returned.items() if new is not None}
                grads = {place: _replaced(returned.get(place), grad) for place, grad in grads.items()}
    return _replaced(mark.given.get(index), grad)


def run_eager(mark: Mark, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Both of the above in eager code: hooks get the gradients themselves, and autograd may record."""
    came: Any = {place: grad for place, grad in enumerate(grads) if grad is not None}
    if not came:
        return grads
    with Running(mark):
        for fn in tuple(mark.fns):
            if len(grads) == 1:
                came = {0: _replaced(fn(came[0]), came[0])}
            else:
                returned = fn(dict(came)) or {}
                came = {place: _replaced(returned.get(place), grad) for place, grad in came.items()}
    return tuple(came.get(place) for place in range(len(grads)))


def _lent(grad: Tensor) -> Tensor:
    """The gradient for a hook to read, and to keep.

    Compiled code reuses buffers that it does not need any more. So a hook gets a lazy copy, which is made only if one
    of the two is written to while the other is alive: never, for a hook that only looks.
    """
    try:
        return lazy_copy(grad)
    except RuntimeError:  # memory that did not come from torch's allocator cannot be shared so
        return grad.clone()


def _replaced(replaced: Any, grad: Tensor) -> Tensor:
    if replaced is None:
        return grad
    if not isinstance(replaced, Tensor):
        raise StateError(
            "a hook must return a gradient or None",
            got=f"a {type(replaced).__name__}",
            fix="return a tensor like the gradient, or nothing",
        )
    if (replaced.shape, replaced.dtype, replaced.device) != (grad.shape, grad.dtype, grad.device):
        raise StateError(
            "a hook must return a gradient of the same shape, dtype and device",
            got=f"{_describe(replaced)} in place of {_describe(grad)}",
            fix="return a tensor like the gradient",
        )
    if replaced.stride() == grad.stride() or 0 in grad.stride():
        return replaced
    return torch.empty_strided(grad.shape, grad.stride(), dtype=grad.dtype, device=grad.device).copy_(replaced)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
