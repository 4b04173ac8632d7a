"""The place in the graph where gradients are shown: an identity whose backward calls the hooks.

In compiled code it is the operator ``show``, which Dynamo leaves alone and AOTAutograd traces through, so that its
backward stands in the backward graph as ``give``. Eager code has a node of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway.state._load import Wire, mark_of, wire_of
from sternway.state._ops import LIBRARY
from sternway.state._run import run_eager


class _Traced(torch.autograd.Function):
    """The token is saved as tensors are, since nothing else reaches a compiled backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Any:
        ctx.save_for_backward(token)
        ctx.set_materialize_grads(False)
        return _as_they_are(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        give, arrive = torch.ops.sternway.state_give, torch.ops.sternway.state_arrive
        (token,) = ctx.saved_tensors
        came = [(place, grad) for place, grad in enumerate(grads) if grad is not None]
        after = [arrive(grad, token, place) for place, grad in came] if len(grads) > 1 else []
        given = {place: give(grad, token, place, after) for place, grad in came}
        return None, *(given.get(place) for place in range(len(grads)))


class _Eager(torch.autograd.Function):
    """The token is kept on the node, where a checkpoint does not replace it by that of the second forward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Any:
        ctx.token = token
        ctx.set_materialize_grads(False)
        return _as_they_are(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *run_eager(mark_of(ctx.token), grads)


def _as_they_are(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in tensors)  # no views to autograd: they may be changed in place


def _show(token: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(_Traced.apply(token, *tensors))


LIBRARY.define("state_show(Tensor token, Tensor(a)[] tensors) -> Tensor(a)[]")
LIBRARY.impl("state_show", _show, "CompositeImplicitAutograd")


def show_eager(token: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """``show`` for eager code."""
    return list(_Eager.apply(token, *tensors))


def token_of(tensor: Tensor, wire: Wire) -> Tensor | None:
    """The token of the ``on_grad`` of this wire that a tensor came from, if it did; eager code only."""
    token: Tensor | None = getattr(tensor.grad_fn, "token", None)
    return token if token is not None and wire_of(token)[0] is wire else None
