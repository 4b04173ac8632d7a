"""The places a gradient can arrive at, and a hook there that always runs.

A place is named by a tensor, a ``GradientEdge`` or a node. At each, the hook has to be a *tensor* hook: the engine runs
those wherever a gradient arrives, while a node's own hooks are skipped where ``autograd.grad`` takes the gradient out
before the node would run.

A tensor hook at an edge whose tensor is gone: the engine asks a tensor only for its dictionary of hooks and for which
output of its node it is. So a stand-in will do: one of several outputs of an ``unbind``, with the right number.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from sternway.errors import HookError

Place = Tensor | GradientEdge | Node
GradHook = Callable[[Tensor | None], None]


def resolve(place: Any, name: str) -> Tensor | GradientEdge:
    """The place as a tensor or an edge; an edge to a leaf is the leaf itself."""
    if isinstance(place, Tensor):
        if not place.requires_grad:
            raise HookError(
                "a gradient arrives only at a tensor that requires one",
                got=f"{name} of shape {tuple(place.shape)} with requires_grad=False",
                fix="leave it out, or call requires_grad_() on it before the forward",
            )
        return place
    if isinstance(place, GradientEdge):
        edge = place
    elif isinstance(place, Node):
        outputs = len(_outputs(place))
        if outputs > 1:
            raise HookError(
                "a node stands for its one output",
                got=f"{name}, a {type(place).__name__} with {outputs} outputs",
                fix="say which output: GradientEdge(node, 0), GradientEdge(node, 1), …",
            )
        edge = GradientEdge(place, 0)
    else:
        raise HookError(
            "a place is a tensor, a GradientEdge or a graph node",
            got=f"{name}, a {type(place).__name__}",
            fix="pass the tensor, or torch.autograd.graph.get_gradient_edge(tensor)",
        )
    if not 0 <= edge.output_nr < max(1, len(_outputs(edge.node))):
        raise HookError(
            "an edge leads to one of its node's outputs",
            got=f"{name}, output {edge.output_nr} of a {type(edge.node).__name__} with {len(_outputs(edge.node))}",
            fix="take the edge from the tensor: torch.autograd.graph.get_gradient_edge(tensor)",
        )
    variable = getattr(edge.node, "variable", None)
    return variable if isinstance(variable, Tensor) else edge


def attach(place: Tensor | GradientEdge, hook: GradHook) -> RemovableHandle:
    """Run ``hook`` with the gradient (None if undefined) whenever one arrives at ``place``."""
    if isinstance(place, Tensor):
        handle: RemovableHandle = place.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's
        return handle
    with torch.enable_grad():
        stand_in = torch.zeros(place.output_nr + 1, requires_grad=True).unbind()[place.output_nr]
    hooks: OrderedDict[int, GradHook] = OrderedDict()
    stand_in._backward_hooks = hooks  # type: ignore[assignment]  # an undefined gradient comes as None
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    place.node._register_hook_dict(stand_in)
    return handle


def leaf_node(leaf: Tensor) -> Any:
    """The leaf's AccumulateGrad node, made if there is none."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # a view has a grad_fn


def _outputs(node: Any) -> list[Any]:
    # AccumulateGrad, and a node that has no recorded outputs yet, have one.
    return list(node._input_metadata)
