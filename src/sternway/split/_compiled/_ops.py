"""What the cut asks of a graph's nodes: what a value weighs, what is worth waiting for, what is cheap to do again."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

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


@cache
def _is_view_op(target: OpOverload) -> bool:
    if target.namespace not in ("aten", "prims"):
        return False  # whatever it does, its result is held: it is not done again
    aliases = [argument.alias_info for argument in target._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


@cache
def _is_costly_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return not callable(getattr(operator, getattr(target, "__name__", ""), None))  # a higher-order operator
    if target.namespace not in ("aten", "prims"):
        return True  # whatever it does, it is done once
    return target.overloadpacket in flop_registry or target.overloadpacket in _TABLES


@cache
def _is_cheap_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    if target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return torch.Tag.pointwise in target.tags or _is_view_op(target) or target.overloadpacket in _PLAIN


def is_view(node: Node) -> bool:
    """Whether the node's value is another's memory seen differently."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]  # getitem's first argument is a node
    return node.op == "call_function" and isinstance(node.target, OpOverload) and _is_view_op(node.target)


def is_costly(node: Node) -> bool:
    """Whether the node is worth waiting for: a product, a convolution, a table, or an operator we do not know."""
    if node.op != "call_function" or node.target is operator.getitem or is_number(node):
        return node.op in ("call_module", "call_method")
    return _is_costly_op(node.target)


def is_cheap(node: Node) -> bool:
    """Whether W may compute the node again: a view, or one pass over numbers that are held anyway."""
    if node.op == "get_attr" or is_number(node):
        return True
    if node.target is operator.getitem:
        return is_cheap(node.args[0])  # type: ignore[arg-type]
    return node.op == "call_function" and _is_cheap_op(node.target)


def is_tuple(node: Node) -> bool:
    """Whether the node's value is several values, each of which is a node of its own."""
    return isinstance(node.meta.get("val"), tuple | list) or any(
        user.target is operator.getitem and user.args[0] is node for user in node.users
    )


def is_number(node: Node) -> bool:
    """Whether the node's value is a size or another scalar, which costs nothing to hold."""
    return isinstance(node.meta.get("val"), SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def effects(graph: Graph) -> list[Node]:
    """Nodes that must run though nothing uses them."""
    return [node for node in graph.nodes if node.op.startswith("call") and node.is_impure() and not node.users]


def base(node: Node) -> Node:
    """The node whose memory this one shows."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]  # a view's first argument is what it shows
    return node


def hint(number: int | SymInt) -> int:
    """A size as a number, from what it was when the graph was made."""
    if isinstance(number, SymInt):
        known = number.node.hint
        return 4096 if known is None else int(known)
    return int(number)


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a tuple."""
    if isinstance(value, Tensor):
        count = value.element_size()
        for size in value.shape:
            count *= hint(size)
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
        found = argument.meta.get("val") if isinstance(argument, Node) else argument
        if isinstance(found, Tensor) and any(isinstance(size, SymInt) for size in found.shape):
            return torch.empty([hint(size) for size in found.shape], device="meta", dtype=found.dtype)
        return hint(found) if isinstance(found, SymInt) else found

    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    return int(formula(*args, **kwargs, out_val=value(node)))
