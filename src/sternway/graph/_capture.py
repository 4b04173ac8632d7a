"""``capture``: one walk over the live graph, without recursion, into frozen records.

Nodes are listed in forward order: the nodes that made a node's inputs come before it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sternway._torch import require
from sternway._torch.autograd import gradient_slots, sequence_number
from sternway._torch.hooks import accumulate_hooks, tensor_hooks
from sternway._tree import leaves
from sternway.errors import GraphError
from sternway.graph._owners import OwnerHint, owners
from sternway.graph._preview import preview
from sternway.graph._records import Node, Parameter, TensorInfo
from sternway.graph._saved import Reader
from sternway.graph._snapshot import Graph
from sternway.graph._tags import Tag, tag_of
from sternway.graph._walk import LiveNode, forward_order, is_leaf


def capture(tensors: Any, model: nn.Module | None = None) -> Graph:
    """Take a frozen snapshot of the autograd graph behind ``tensors``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> g = capture(model(torch.ones(3, 4)).sum(), model)
        >>> [node.kind for node in g.nodes if not node.is_leaf]
        ['TBackward0', 'AddmmBackward0', 'SumBackward0']
        >>> g.saved_bytes  # the input, which the weight's gradient needs
        48

    No backward runs, no saved tensor is unpacked, nothing is kept alive, and the graph can still be used.

    Args:
        tensors: a loss, or outputs in any nesting of tuples, lists and dicts; ``GradientEdge``s too.
        model: names parameters and buffers, and so the modules that nodes belong to. In a graph made under
            ``graph.record(model)`` every node is tagged with its module. Otherwise a node belongs to the module whose
            parameter it uses, and a node between two such nodes to the innermost module that contains both.

    Raises:
        GraphError: no tensor among ``tensors`` has a graph.
    """
    require("graph")
    GraphError.unless(
        model is None or isinstance(model, nn.Module), "model must be an nn.Module", model, "pass it, or leave it out"
    )
    roots = _roots(tensors)
    with _uncollected():
        return _snapshot(roots, model)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the cycle collector off: it would scan the growing heap again and again, and nothing here is a cycle."""
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
        if is_leaf(node) and isinstance(variable := node.variable, nn.Parameter):
            names.setdefault(id(variable), "")
            reader.belongs(variable, "parameter", names[id(variable)])

    metas = [tuple([reader.info(meta) for meta in gradient_slots(node)]) for node in order]
    tags = [tag_of(node) for node in order]
    hints = [_hint(node, tag, numbers, names) for node, tag in zip(order, tags, strict=True)]
    modules = owners(hints)
    nodes = [
        _node(index, node, hint, module, tag, metas, reader)
        for index, (node, hint, module, tag) in enumerate(zip(order, hints, modules, tags, strict=True))
    ]
    return Graph(
        nodes=tuple(nodes),
        roots=tuple((numbers[edge.node], edge.output_nr) for edge in roots),
        parameters=_parameters(model, order, reader),
        split=preview(roots, order, nodes),
        torch=torch.__version__,
        classes=() if model is None else tuple((name, type(each).__name__) for name, each in model.named_modules()),
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
            "capture needs a tensor that requires a gradient",
            got=f"{len(found)} tensors, none of which does" if found else f"a {type(tensors).__name__} without tensors",
            fix="run the forward outside torch.no_grad(), with parameters or inputs that require gradients",
        )
    return edges


def _names(model: nn.Module | None, reader: Reader) -> dict[int, str]:
    """Parameters' names by identity; the reader is told which storages are parameters' and which buffers'."""
    names: dict[int, str] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
            reader.belongs(parameter, "parameter", names[id(parameter)])
        for name, buffer in model.named_buffers():
            reader.belongs(buffer, "buffer", name)
    return names


def _hint(node: LiveNode, tag: Tag | None, numbers: dict[LiveNode, int], names: dict[int, str]) -> OwnerHint:
    following = [None if child is None else (numbers[child], output) for child, output in node.next_functions]
    if not following and is_leaf(node):
        return OwnerHint((), names.get(id(node.variable)))
    return OwnerHint(tuple(following), None, None if tag is None else tag.module)


def _node(
    index: int,
    node: LiveNode,
    hint: OwnerHint,
    module: str,
    tag: Tag | None,
    metas: list[tuple[TensorInfo, ...]],
    reader: Reader,
) -> Node:
    kind = type(node).__name__
    if is_leaf(node):
        hooks = _leaf_hooks(node.variable)
        return Node(index, kind, None, metas[index], (), (), module, hint.parameter, hooks=hooks)
    inputs = tuple([None if target is None else _at(metas[target[0]], target[1]) for target in hint.next])
    saved, freed = reader.saved(node)
    sequence = sequence_number(node)
    if tag is None:
        return Node(index, kind, sequence, metas[index], inputs, tuple(hint.next), module, None, saved, freed=freed)
    hooks = ("tensor hook",) * tag.hooks
    return Node(
        index,
        kind,
        sequence,
        metas[index],
        inputs,
        tuple(hint.next),
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
    before, after = tensor_hooks(variable) or (), accumulate_hooks(variable) or ()
    return ("tensor hook",) * len(before) + ("post-accumulate hook",) * len(after)


def _parameters(model: nn.Module | None, order: list[LiveNode], reader: Reader) -> tuple[Parameter, ...] | None:
    if model is None:
        return None
    reached = {id(node.variable): index for index, node in enumerate(order) if is_leaf(node)}
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
