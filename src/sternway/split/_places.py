"""What callers of the split pass: outputs, their gradients and inputs, nested, as places in the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway._torch import autograd
from sternway._tree import children, leaves
from sternway.errors import SplitError
from sternway.split._part import Edge


def edges_of(tree: Any, name: str) -> dict[int, Edge]:
    """Where each tensor of ``tree`` that needs a gradient is in the graph, by the tensor's id."""
    found = {}
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                found[id(leaf)] = edge_of(leaf)
        elif isinstance(leaf, GradientEdge):
            found[id(leaf)] = edge_of(leaf)
        elif isinstance(leaf, Iterable) and not isinstance(leaf, str | bytes):
            raise SplitError(
                f"{name} must be nested in tuples, lists, dicts and dataclasses",
                got=f"a {type(leaf).__name__}",
                fix="make a list or a tuple of it",
            )
    return found


def edge_of(place: Tensor | GradientEdge) -> Edge:
    """Where a tensor is in the graph."""
    edge = root_of(place)
    return edge.node, edge.output_nr


def root_of(place: Tensor | GradientEdge) -> GradientEdge:
    """Where a tensor is in the graph. Whoever has it keeps the graph behind it."""
    return place if isinstance(place, GradientEdge) else autograd.edge_of(place)


def pair_leaves(outputs: Any, grads: Any, where: str = "outputs") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of ``outputs`` with its name and its leaf of ``grads``; where ``grads`` is None, so are its leaves."""
    parts = None if type(outputs) is Tensor else children(outputs)
    if parts is None:
        yield where, outputs, grads
        return
    if grads is None:
        for step, part in parts:
            yield from pair_leaves(part, None, where + step)
        return
    theirs = children(grads)
    same_keys = not isinstance(outputs, Mapping) or (isinstance(grads, Mapping) and outputs.keys() == grads.keys())
    if theirs is None or len(theirs) != len(parts) or not same_keys:
        raise SplitError(
            "grad_outputs must be nested as outputs are",
            got=f"{describe(grads)} for {where}, which is {describe(outputs)}",
            fix="pass one gradient (or None) for each output, nested in the same way",
        )
    ordered = [grads[key] for key in outputs] if isinstance(outputs, Mapping) else [grad for _, grad in theirs]
    for (step, part), grad in zip(parts, ordered, strict=True):
        yield from pair_leaves(part, grad, where + step)


def roots_of(outputs: Any, grad_outputs: Any) -> tuple[list[Any], list[Tensor | None]]:
    """The outputs that gradient starts from, with their gradients."""
    tensors: list[Any] = []
    grads: list[Tensor | None] = []
    seen_any = False
    for where, output, grad in pair_leaves(outputs, grad_outputs):
        if not isinstance(output, GradientEdge) and not (isinstance(output, Tensor) and output.requires_grad):
            continue
        shape = _shape(output)
        if grad is None:
            seen_any = True
            if shape is None or prod(shape) != 1:
                if grad_outputs is None:
                    raise SplitError(
                        "grad_outputs cannot be left out unless every output is a scalar",
                        got=f"{where}, which is {describe(output)}, and no grad_outputs",
                        fix="pass grad_outputs, nested as the outputs are",
                    )
                continue
        elif not isinstance(grad, Tensor) or _shape(grad) != shape:
            raise SplitError(
                "an output's gradient must be a tensor of the output's shape, or None",
                got=f"{describe(grad)} for {where}, which is {describe(output)}",
                fix="pass the gradient that the next stage sent back for it",
            )
        seen_any = True
        tensors.append(output)
        grads.append(grad)
    if not seen_any:
        raise SplitError(
            "at least one output must need a gradient",
            got=f"{sum(1 for _ in leaves(outputs))} outputs, each of which does not require grad and does not have a "
            "grad_fn",
            fix="run the forward with gradients enabled and outside torch.no_grad()",
        )
    return tensors, grads


def _shape(place: Tensor | GradientEdge) -> tuple[int, ...] | None:
    """The shape of a tensor, or of the gradient that arrives at an edge; None of nested tensors that have none."""
    if isinstance(place, GradientEdge):
        return tuple(autograd.gradient_slots(place.node)[place.output_nr].shape)
    return None if place.is_nested and place.layout is torch.strided else tuple(place.shape)


def describe(value: Any) -> str:
    if isinstance(value, GradientEdge):
        return f"an edge for gradients of shape {_shape(value)}"
    if isinstance(value, Tensor):
        shape = _shape(value)
        return "a nested tensor" if shape is None else f"a tensor of shape {shape}"
    parts = children(value)
    keys = f" with {list(value)}" if isinstance(value, Mapping) else ""
    return f"a {type(value).__name__}" + (f" of {len(parts)}" if parts is not None else "") + keys
