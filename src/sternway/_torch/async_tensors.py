"""Results of collectives that are still under way, and what becomes of them in compiled code.

An eager collective of a DTensor returns an ``AsyncCollectiveTensor``, which waits when it is first used. AOTAutograd
takes the tensor inside of one that a compiled region is given. That one has no history, so in torch 2.13 the region
computes no gradient for it: what lies before the region gets none, or zeros, without an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.fx import GraphModule

from sternway._torch.compile import COMPILED_NODE
from sternway._torch.probe import probe

DROPPED = {
    "rule": "torch.compile drops the gradient of what comes before a compiled region, if the region's input is an "
    "AsyncCollectiveTensor, the result of a DTensor's collective",
    "got": "a compiled region with such an input",
    "fix": 'compile with backend="sternway", which waits for it; or compile what does the collective, too',
}
"""The words of an error for a graph that ``drops_gradient``."""


class _Arrived(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        arrived: Tensor = tensor.trigger_wait().detach()  # without it a history of what is inside would be replaced
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def is_under_way(value: Any) -> bool:
    """Whether a value is the result of a collective that nobody may have waited for."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(value, AsyncCollectiveTensor)


def arrived(tensor: Tensor) -> Tensor:
    """Of a collective under way, its result as a plain tensor of the same memory; gradients pass."""
    found: Tensor = _Arrived.apply(tensor)
    return found


def with_arrived(
    compiler: Callable[[Sequence[Any]], Callable[..., Any]], module: GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """What a compiler makes for one of Dynamo's graphs, called with results in place of collectives under way.

    Dynamo compiles again for inputs of other types, so that the same inputs are under way in every call.
    """
    places = [place for place, value in enumerate(inputs) if is_under_way(value)]
    if not places:
        return compiler(inputs)
    # Of these Dynamo's own examples, whose sizes have the symbols of its graph; of a new tensor AOTAutograd knows none.
    traced = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
    examples = [traced[place] if place in places else value for place, value in enumerate(inputs)]
    with torch.enable_grad():
        compiled = compiler(_arrive(examples, places))

    def call(*arguments: Any) -> Any:
        return compiled(*_arrive(arguments, places))

    return call


def _arrive(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    found = list(values)
    for place in places:
        found[place] = arrived(found[place])
    return found


def drops_gradient(node: Any) -> bool:
    """Whether a compiled graph, by its ``COMPILED_NODE``, computes no gradient for an input that needs one."""
    known = node._forward_cls.metadata.input_info
    return any(needs and not info.requires_grad for needs, info in zip(node.needs_input_grad, known, strict=False))


def any_drops_gradient(outputs: Sequence[Tensor | GradientEdge]) -> bool:
    """Whether a compiled graph below these tensors or edges computes no gradient for an input that needs one."""
    nodes: list[Any] = [each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs]
    stack = [node for node in nodes if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if type(node).__name__ == COMPILED_NODE and drops_gradient(node):
            return True
        below = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= below
        stack += below
    return False


@probe(
    "AsyncCollectiveTensor.trigger_wait",
    expected="gives the result of a collective",
    features=("split.parallel", "pipeline.sharded"),
)
def _under_way() -> bool:
    if not torch.distributed.is_available():
        return True
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    leaf = torch.ones(2, requires_grad=True)
    inner = torch.full((2,), 3.0)
    under_way = AsyncCollectiveTensor(inner)
    under_way.completed = True  # no collective has made it, so that there is none to wait for
    result = arrived(under_way.requires_grad_())
    (result * leaf).sum().backward()
    plain = type(result) is Tensor and result.data_ptr() == inner.data_ptr() and inner.grad_fn is None
    return plain and is_under_way(under_way) and not is_under_way(leaf) and under_way.grad is not None


@probe(
    f"{COMPILED_NODE}._forward_cls.metadata.input_info: requires_grad",
    expected="say which inputs of a compiled graph it computes gradients for",
    features=("split.compiled",),
)
def _dropped() -> bool:
    from torch._functorch._aot_autograd.schemas import InputAliasInfo

    from sternway._torch.compile import traced_node

    known = {field.name for field in dataclasses.fields(InputAliasInfo)}
    return "requires_grad" in known and not drops_gradient(traced_node())
