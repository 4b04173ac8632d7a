"""What the cut needs to know of a graph's nodes: how many bytes a value has, what is costly, what is cheap."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from sternway._torch.compile import OpOverload, example_value, shows_argument, size_hint

aten, prims = torch.ops.aten, torch.ops.prims

# Beside what counts in floating-point operations: tables, whose gradient is a scatter over the whole vocabulary.
_TABLES = {aten.embedding_dense_backward, aten.embedding_backward, aten.index_put, aten._unsafe_index_put}
# Cheap, though torch tags neither as pointwise nor declares as views.
_PLAIN = {
    aten._to_copy,
    aten._unsafe_view,
    aten.arange,
    aten.clone,
    aten.full,
    aten.full_like,
    aten.ones,
    aten.reshape,
    aten.scalar_tensor,
    aten.zeros,
    aten.zeros_like,
    prims.convert_element_type,
    prims.iota,
}

_OF_GROUPS = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem"}


@cache
def _is_view_op(target: Any) -> bool:
    return target.namespace in ("aten", "prims") and shows_argument(target)  # of others' operators we know nothing


@cache
def _is_costly_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return not callable(getattr(operator, getattr(target, "__name__", ""), None))  # a higher-order operator
    if target.namespace not in ("aten", "prims"):
        return True  # of others' operators we know nothing
    return target.overloadpacket in flop_registry or target.overloadpacket in _TABLES


@cache
def _is_cheap_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or _is_view_op(target) or target.overloadpacket in _PLAIN


def is_view(node: Node) -> bool:
    """Whether the node's value is a view of another's."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]  # getitem's first argument is a node
    return node.op == "call_function" and isinstance(node.target, OpOverload) and _is_view_op(node.target)


def is_costly(node: Node) -> bool:
    """Whether the node is worth deferring: a product, a convolution, a table, or an operator we do not know."""
    if node.op != "call_function" or node.target is operator.getitem or is_number(node):
        return node.op in ("call_module", "call_method")
    return _is_costly_op(node.target)


def is_cheap(node: Node) -> bool:
    """Whether W may compute the node again: a view, or one pass over tensors that are held anyway."""
    if node.op == "get_attr" or is_number(node):
        return True
    if node.target is operator.getitem:
        return is_cheap(node.args[0])  # type: ignore[arg-type]
    return node.op == "call_function" and _is_cheap_op(node.target)


def is_tuple(node: Node) -> bool:
    """Whether the node's value is several values, each of which is a node of its own."""
    return isinstance(example_value(node), tuple | list) or any(
        user.target is operator.getitem and user.args[0] is node for user in node.users
    )


def is_number(node: Node) -> bool:
    """Whether the node's value is a size or another scalar, which costs nothing to hold."""
    return isinstance(example_value(node), SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def effects(graph: Graph) -> list[Node]:
    """Nodes that must run though nothing uses them."""
    return [node for node in graph.nodes if node.op.startswith("call") and node.is_impure() and not node.users]


def collectives(graph: Graph) -> list[Node]:
    """Nodes in which other processes take part."""
    return [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.target.namespace in _OF_GROUPS]


def base(node: Node) -> Node:
    """The node of which this one is a view; itself if it is none."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # a view's first argument is its base
    return node


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a tuple."""
    if isinstance(value, Tensor):
        count = value.element_size()
        for size in value.shape:
            count *= size_hint(size)
        return count
    if isinstance(value, tuple | list):
        return sum(nbytes(part) for part in value)
    return 0


def flops(node: Node) -> int:
    """Floating-point operations of the node, by torch's own formulas; 0 for what has none."""
    target = node.target
    formula = flop_registry.get(target.overloadpacket) if isinstance(target, OpOverload) else None
    if formula is None:
        return 0

    def value(argument: Any) -> Any:
        found = example_value(argument) if isinstance(argument, Node) else argument
        if isinstance(found, Tensor) and any(isinstance(size, SymInt) for size in found.shape):
            return torch.empty([size_hint(size) for size in found.shape], device="meta", dtype=found.dtype)
        return size_hint(found) if isinstance(found, SymInt) else found

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    return int(formula(*args, **kwargs, out_val=value(node)))
