"""``capture``: one walk over the live graph, without recursion, into frozen records.

Nodes come out in forward order: whatever made a node's inputs comes before it. The walk holds torch's nodes while it
runs and lets go of them at the end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sternway._tree import leaves
from sternway.errors import GraphError
from sternway.graph._owners import Place, owners
from sternway.graph._preview import preview
from sternway.graph._records import Node, Parameter, TensorInfo
from sternway.graph._saved import Reader
from sternway.graph._snapshot import Graph
from sternway.graph._tags import Tag, tag_of
from sternway.graph._walk import LiveNode, forward_order

_LEAF = "AccumulateGrad"


def capture(tensors: Any, model: nn.Module | None = None) -> Graph:
    """Take a frozen snapshot of the autograd graph behind ``tensors``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> g = capture(model(torch.ones(3, 4)).sum(), model)
        >>> [node.kind for node in g.nodes if not node.is_leaf]
        ['TBackward0', 'AddmmBackward0', 'SumBackward0']
        >>> g.saved_bytes  # the input, which the weight's gradient needs
        48

    No backward is run, no saved tensor is unpacked, nothing is kept alive, and the graph can be used as before.

    Args:
        tensors: a loss, or outputs in any nesting of tuples, lists and dicts; ``GradientEdge``s too.
        model: names parameters and buffers, and so the modules that nodes belong to. In a graph made under
            ``graph.record(model)`` every node knows its module; otherwise a node belongs to the module whose
            parameter it uses, and one between such nodes to the module around both.

    Raises:
        GraphError: there is no graph behind ``tensors``.
    """
    GraphError.unless(
        model is None or isinstance(model, nn.Module), "model is a module", model, "pass it, or leave it out"
    )
    roots = _roots(tensors)
    with _uncollected():
        return _snapshot(roots, model)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the cycle collector from going over a growing heap again and again: nothing made here is a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _snapshot(roots: list[GradientEdge], model: nn.Module | None) -> Graph:
    order = forward_order([edge.node for edge in roots])
    numbers = {node: index for index, node in enumerate(order)}
    reader = Reader()
    names = _names(model, reader)
    for node in order:
        if type(node).__name__ == _LEAF and isinstance(variable := node.variable, nn.Parameter):
            names.setdefault(id(variable), "")
            reader.belongs(variable, "parameter", names[id(variable)])

    metas = [tuple([reader.info(meta) for meta in node._input_metadata]) for node in order]
    tags = [tag_of(node) for node in order]
    places = [_place(node, tag, numbers, names) for node, tag in zip(order, tags, strict=True)]
    modules = owners(places)
    nodes = [
        _node(index, node, place, module, tag, metas, reader)
        for index, (node, place, module, tag) in enumerate(zip(order, places, modules, tags, strict=True))
    ]
    return Graph(
        nodes=tuple(nodes),
        roots=tuple((numbers[edge.node], edge.output_nr) for edge in roots),
        parameters=_parameters(model, order, reader),
        split=preview(roots, order, nodes),
        torch=torch.__version__,
    )


def _roots(tensors: Any) -> list[GradientEdge]:
    found = [leaf for leaf in leaves(tensors) if isinstance(leaf, Tensor | GradientEdge)]
    edges = [
        leaf if isinstance(leaf, GradientEdge) else get_gradient_edge(leaf)
        for leaf in found
        if isinstance(leaf, GradientEdge) or leaf.requires_grad
    ]
    if not edges:
        raise GraphError(
            "a graph is captured from a tensor that requires a gradient",
            got=f"{len(found)} tensors, none of which does" if found else f"a {type(tensors).__name__} without tensors",
            fix="run the forward outside torch.no_grad(), with parameters or inputs that require gradients",
        )
    return edges


def _names(model: nn.Module | None, reader: Reader) -> dict[int, str]:
    """Parameters' names by identity; the reader learns which storages are parameters and which buffers."""
    names: dict[int, str] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
            reader.belongs(parameter, "parameter", names[id(parameter)])
        for name, buffer in model.named_buffers():
            reader.belongs(buffer, "buffer", name)
    return names


def _place(node: LiveNode, tag: Tag | None, numbers: dict[LiveNode, int], names: dict[int, str]) -> Place:
    following = [None if child is None else (numbers[child], output) for child, output in node.next_functions]
    if not following and type(node).__name__ == _LEAF:
        return Place((), names.get(id(node.variable)))
    return Place(tuple(following), None, None if tag is None else tag.module)


def _node(
    index: int,
    node: LiveNode,
    place: Place,
    module: str,
    tag: Tag | None,
    metas: list[tuple[TensorInfo, ...]],
    reader: Reader,
) -> Node:
    kind = type(node).__name__
    if kind == _LEAF:
        hooks = _leaf_hooks(node.variable)
        return Node(index, kind, None, metas[index], (), (), module, place.parameter, hooks=hooks)
    inputs = tuple([None if target is None else _at(metas[target[0]], target[1]) for target in place.next])
    saved, freed = reader.saved(node)
    sequence = node._sequence_nr()
    if tag is None:
        return Node(index, kind, sequence, metas[index], inputs, tuple(place.next), module, None, saved, freed=freed)
    hooks = ("tensor hook",) * tag.hooks
    return Node(
        index,
        kind,
        sequence,
        metas[index],
        inputs,
        tuple(place.next),
        module,
        None,
        saved,
        hooks,
        tag.source,
        tag.op,
        freed,
    )


def _at(outputs: tuple[TensorInfo, ...], index: int) -> TensorInfo | None:
    return outputs[index] if index < len(outputs) else None


def _leaf_hooks(variable: Tensor) -> tuple[str, ...]:
    after: Any = getattr(variable, "_post_accumulate_grad_hooks", None)
    return ("tensor hook",) * len(variable._backward_hooks or ()) + ("post-accumulate hook",) * len(after or ())


def _parameters(model: nn.Module | None, order: list[LiveNode], reader: Reader) -> tuple[Parameter, ...] | None:
    if model is None:
        return None
    reached = {id(node.variable): index for index, node in enumerate(order) if type(node).__name__ == _LEAF}
    return tuple(
        Parameter(
            name,
            reader.info(parameter),
            parameter.numel() * parameter.element_size(),
            parameter.requires_grad,
            reached.get(id(parameter)),
        )
        for name, parameter in model.named_parameters()
    )
