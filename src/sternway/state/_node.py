"""The node where gradients are shown to hooks: an identity whose backward calls them.

In compiled code it is the operator ``show``, which Dynamo leaves as it is and AOTAutograd traces into, so that its
backward is ``give`` in the backward graph. In eager code the node holds its mark itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sternway.errors import StateError
from sternway.state._load import Hook, Mark, Wire
from sternway.state._ops import NO_GRADIENT, SECOND_STATE, operator, refuse
from sternway.state._run import run_eager


def show_traced(wire: Wire, tensors: list[Tensor], fns: Sequence[Hook], *, again: bool) -> list[Tensor]:
    """Show the gradients of ``tensors`` to ``fns``; traced by Dynamo.

    It reads and writes two attributes of the wire and never looks at the functions, so that Dynamo guards on neither.
    Dynamo makes the writes after the graph has run: that is how the functions reach their marks.

    Args:
        wire: the state's.
        tensors: what to show the gradients of; the result is to be used in their place.
        fns: called in order.
        again: a tensor that was returned before gets more functions at the same place.
    """
    graph, second, back = torch.ops.sternway.state_ask(tensors[0], wire.key).shape
    if again and back:
        key = wire.key - (back - 1)
    else:
        needed = all(tensor.requires_grad for tensor in tensors)
        refusal = SECOND_STATE if second else 0 if needed else NO_GRADIENT
        key, token = torch.ops.sternway.state_mark(wire.key, graph, refusal)
        wire.key = key
        if not refusal:  # else the mark raises, when the graph runs
            tensors = torch.ops.sternway.state_show(token, tensors)
            torch.ops.sternway.state_tell(tensors[0], key)
    for fn in fns:
        wire.added = (key, fn, wire.added)
    return tensors


def show_eager(wire: Wire, tensors: list[Tensor], fns: Sequence[Hook], *, again: bool) -> list[Tensor]:
    """``show_traced`` where nothing is compiled."""
    if not all(callable(fn) for fn in fns):
        got = ", ".join(type(fn).__name__ for fn in fns)
        raise StateError("a hook must be a function", got=got, fix="pass something that can be called with a gradient")
    if not all(tensor.requires_grad for tensor in tensors):
        refuse(NO_GRADIENT)
    known = getattr(tensors[0].grad_fn, "mark", None) if again else None
    if isinstance(known, Mark) and known.wire is wire:
        known.fns.extend(fns)
        return tensors
    return list(_Eager.apply(wire.add(fns), *tensors))  # type: ignore[no-untyped-call]  # torch's


class _Eager(torch.autograd.Function):
    """Keeps the mark on the node: a checkpoint would replace what is saved by what its second forward saves."""

    @staticmethod
    def forward(ctx: Any, mark: Mark, *tensors: Tensor) -> Any:
        ctx.mark = mark
        ctx.set_materialize_grads(False)
        return _as_they_are(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *run_eager(ctx.mark, grads)


class _Traced(torch.autograd.Function):
    """Saves the mark's token, since only saved tensors reach a compiled backward."""

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


def _as_they_are(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach() for tensor in tensors)  # no views to autograd: they may be changed in place


def _show(token: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(_Traced.apply(token, *tensors))  # type: ignore[no-untyped-call]  # torch's


operator("state_show(Tensor token, Tensor(a)[] tensors) -> Tensor(a)[]", "CompositeImplicitAutograd", _show)
