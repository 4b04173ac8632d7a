"""Custom ``autograd.Function``s: their nodes, and how the engine calls their backward.

The node of a Function is also the ``ctx`` that its backward gets. The engine looks ``apply`` up on the node each time,
so that what is put there is called in place of the backward, with the gradients as the backward gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sternway._torch.autograd import gradient_slots
from sternway._torch.probe import probe

_OF_OPERATORS = "GeneratedBackwardFor_"  # what torch.library calls the Function of an operator with a backward


def function_of(node: Any) -> Any:
    """The ``autograd.Function`` that a node was made by; None for any other node."""
    return getattr(node, "_forward_cls", None)


def is_users(function: type) -> bool:
    """Whether a Function is a user's: not torch's own, though it may stand for a user's operator of torch.library.

    What functorch makes for one call is no subclass of ``autograd.Function``.
    """
    if not issubclass(function, Function):
        return False
    return function.__module__.split(".")[0] != "torch" or function.__name__.startswith(_OF_OPERATORS)


def has_plain_call(function: type) -> bool:
    """Whether the backward takes its gradients one by one and may read what was saved more than once."""
    return not any(getattr(function, name, False) for name in ("boxed_grads_call", "clear_saved_tensors_on_access"))


def backward_of(function: Any) -> Callable[..., Any]:
    """What a user has written as the Function's backward, perhaps under the name ``vjp``."""
    backward: Callable[..., Any] = function.vjp if function.vjp is not Function.vjp else function.backward
    return backward


@contextmanager
def calling_instead(calls: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """In the block the engine calls, for each of some nodes, a function in place of its backward."""
    try:
        for node, call in calls.items():
            node.apply = call
        yield
    finally:
        for node in calls:
            vars(node).pop("apply", None)


@cache
def functions_outlive_graphs() -> bool:
    """Whether a Function's node lives as long as its Python object, as other nodes do.

    In torch 2.11 it lives as long as the graph: whoever goes on from the node must keep a node before it, or a tensor.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = _Same.apply(torch.ones(1, requires_grad=True)).grad_fn
    try:
        return len(gradient_slots(node)) == 1
    except RuntimeError:
        return False


class _Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def call_backward(node: Any, grads: tuple[Tensor | None, ...]) -> Any:
    """Call a node's own backward as the engine does."""
    return type(node).apply(node, *grads)


def attributes_of(node: Any) -> dict[str, Any]:
    """What the forward has put on ``ctx`` by name."""
    return {name: value for name, value in vars(node).items() if name != "apply"}


def packed_values(node: Any) -> list[Any]:
    """What a node saved by ``save_for_backward``, as pack hooks have left it; None for a None."""
    return [each.data for each in node._raw_saved_tensors]


@probe(
    "BackwardCFunction: _forward_cls, apply, needs_input_grad",
    expected="lead to the Function, and are looked up when its backward is called",
    features=("split.learned",),
)
def _function_nodes() -> bool:
    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, count: int, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, None, weight)
            ctx.count = count
            return x * weight * count

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (grads[0] * ctx.count, None, None) if ctx.needs_input_grad == (True, False, True) else None

    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = Scale.apply(x, 3, weight)  # in torch 2.11 the node dies with it
    node: Any = output.grad_fn
    called: list[Any] = []

    def call(*grads: Any) -> Any:
        called.append(grads)
        return call_backward(node, grads)

    with calling_instead({node: call}):
        first = torch.autograd.grad(output.sum(), x, retain_graph=True)[0].tolist()
    kept = [each if each is None else each.tolist() for each in packed_values(node)]
    second = torch.autograd.grad(output.sum(), x)[0].tolist()
    return (
        function_of(node) is Scale
        and is_users(Scale)
        and first == second == [3.0, 3.0]
        and len(called) == 1
        and attributes_of(node) == {"count": 3}
        and kept == [[1.0, 1.0], None, [1.0, 1.0]]
    )
