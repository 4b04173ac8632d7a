"""The place in the graph where gradients are shown: an identity whose backward calls the hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway.state import _ops  # noqa: F401 - defines the operators
from sternway.state._load import Wire, mark_of, wire_of
from sternway.state._run import run_eager


class Shown(torch.autograd.Function):
    """Hands tensors on as they are; going back, hands their gradients to the hooks.

    In compiled code the token is saved as tensors are, since nothing else can be. In eager code it is kept on the node,
    where a checkpoint does not replace it by that of the second forward.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            ctx.save_for_backward(token)
        else:
            ctx.token = token
        ctx.set_materialize_grads(False)
        shown = tuple(tensor.detach() for tensor in tensors)  # not a view to autograd: it may be changed in place
        return shown[0] if len(shown) == 1 else shown

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return None, *run_eager(mark_of(ctx.token), grads)
        (token,) = ctx.saved_tensors
        if len(grads) == 1:
            return None, grads[0] if grads[0] is None else torch.ops.sternway.state_give(grads[0], token, 0, [])
        after = [
            torch.ops.sternway.state_arrive(grad, token, place) for place, grad in enumerate(grads) if grad is not None
        ]
        return None, *(
            None if grad is None else torch.ops.sternway.state_give(grad, token, place, after)
            for place, grad in enumerate(grads)
        )


def token_of(tensor: Tensor, wire: Wire) -> Tensor | None:
    """The token of the ``on_grad`` of this wire that a tensor came from, if it did; eager code only."""
    token: Tensor | None = getattr(tensor.grad_fn, "token", None)
    return token if token is not None and wire_of(token)[0] is wire else None
