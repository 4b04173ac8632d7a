"""The places where a gradient can arrive, and a hook there that always runs.

A place is given as a tensor, a ``GradientEdge`` or a node. The hook must be a *tensor* hook: the engine runs those
wherever a gradient arrives, while a node's own hooks are skipped where ``autograd.grad`` takes the gradient out before
the node runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from sternway._torch.autograd import gradient_slots
from sternway._torch.hooks import hook_gradient_edge
from sternway.errors import HookError

Place = Tensor | GradientEdge | Node
GradHook = Callable[[Tensor | None], None]


def resolve_all(places: Place | Iterable[Place]) -> list[Tensor | GradientEdge]:
    """One place or several, each as a tensor or an edge."""
    single = isinstance(places, Place)
    HookError.unless(
        single or isinstance(places, Iterable), "places must be tensors, edges or nodes", places, "pass a list of them"
    )
    listed: list[Any] = [places] if single else list(places)  # type: ignore[arg-type]  # not single: iterable
    if not listed:
        raise HookError("places cannot be empty", got="no place", fix="pass tensors, edges or nodes")
    return [resolve(place, f"places[{index}]") for index, place in enumerate(listed)]


def resolve(place: Any, name: str) -> Tensor | GradientEdge:
    """The place as a tensor or an edge; an edge to a leaf becomes the leaf."""
    if isinstance(place, Tensor):
        if not place.requires_grad:
            raise HookError(
                "a tensor must require a gradient for one to arrive",
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
                "a node must have one output to be a place",
                got=f"{name}, a {type(place).__name__} with {outputs} outputs",
                fix="say which output: GradientEdge(node, 0), GradientEdge(node, 1), …",
            )
        edge = GradientEdge(place, 0)
    else:
        raise HookError(
            "a place must be a tensor, a GradientEdge or a graph node",
            got=f"{name}, a {type(place).__name__}",
            fix="pass the tensor, or torch.autograd.graph.get_gradient_edge(tensor)",
        )
    if not 0 <= edge.output_nr < max(1, len(_outputs(edge.node))):
        raise HookError(
            "an edge must lead to an output of its node",
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
    return hook_gradient_edge(place, hook)


def _outputs(node: Any) -> list[Any]:
    # AccumulateGrad, and a node that has no recorded outputs yet, have one.
    return list(gradient_slots(node))
