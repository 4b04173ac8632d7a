"""Call the hooks of a mark with the gradients that have arrived, and use what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway._torch.captures import current_capture
from sternway._torch.tensors import lazy_copy
from sternway.errors import StateError
from sternway.state._load import CapturedMark, Mark, Running


def run(mark: Mark, grad: Tensor) -> Tensor:
    """The gradient after the mark's functions, each of which gets what the one before it returned."""
    if isinstance(mark, CapturedMark):
        return _in_replays(mark, {0: grad}, alone=True)[0]
    with Running(mark):
        for fn in tuple(mark.fns):
            grad = _replaced(fn(_lent(grad)), grad)
    return grad


def run_together(mark: Mark, grad: Tensor, index: int) -> Tensor:
    """One of several gradients that have all arrived, after functions that get all of them."""
    if mark.given is None:
        grads, mark.arrived, mark.given = mark.arrived, {}, {}
        if isinstance(mark, CapturedMark):
            mark.given = _in_replays(mark, grads, alone=False)
        else:
            with Running(mark):
                for fn in tuple(mark.fns):
                    returned = fn({place: _lent(grad) for place, grad in grads.items()}) or {}
                    mark.given |= {place: new for place, new in returned.items() if new is not None}
                    grads = {place: _replaced(returned.get(place), grad) for place, grad in grads.items()}
    return _replaced(mark.given.get(index), grad)


def run_eager(mark: Mark, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Both of the above in eager code: hooks get the gradients themselves, and autograd may record."""
    came = {place: grad for place, grad in enumerate(grads) if grad is not None}
    if not came:
        return grads
    call = _in_replays if isinstance(mark, CapturedMark) else _call
    came = call(mark, came, alone=len(grads) == 1)
    return tuple(came.get(place) for place in range(len(grads)))


def _call(mark: Mark, grads: dict[int, Tensor], *, alone: bool) -> dict[int, Tensor]:
    """Call the functions: with the gradient, if it is ``alone``, or with all of them by their places."""
    with Running(mark):
        for fn in tuple(mark.fns):
            returned = {0: fn(grads[0])} if alone else fn(dict(grads)) or {}
            grads = {place: _replaced(returned.get(place), grad) for place, grad in grads.items()}
    return grads


def _in_replays(mark: Mark, grads: dict[int, Tensor], *, alone: bool) -> dict[int, Tensor]:
    """Have the functions called in each replay of the graphs that are being captured; not now."""
    capture = current_capture()
    if capture is None:  # a forward and backward before the capture, which load kernels
        return grads
    places = list(grads)

    def call(fresh: Mark, values: list[Tensor]) -> list[Tensor]:
        return list(_call(fresh, dict(zip(places, values, strict=True)), alone=alone).values())

    return dict(zip(places, capture.pause(mark, list(grads.values()), call), strict=True))


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
