"""Weight gradients that are matrix products: W returns the two factors, and the accumulator multiplies them.

It adds the product to ``.grad`` in the kernel that computes it (``addmm_``), so that the product itself is not written
to memory and read back. The kernel is the same: a compiler calls the library for it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from sternway._torch.compile import example_value

aten = torch.ops.aten
Factors = tuple[Node, Node]


def factors(graph: Graph, node: Node) -> Factors | None:
    """The two sides of the product that ``node`` is, if it is one that nothing else needs.

    Where ``node`` is the transpose of a product, transposes of the sides are put into the graph.
    """
    transposed = False
    while _swaps_last_two(node) and len(node.users) == 1:
        node, transposed = node.all_input_nodes[0], not transposed
    if node.target not in (aten.mm.default, aten.bmm.default) or len(node.users) != 1 or len(node.args) != 2:
        return None
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    return (_transpose(graph, right, node), _transpose(graph, left, node)) if transposed else (left, right)


def _swaps_last_two(node: Node) -> bool:
    value = example_value(node)
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return False
    swapped = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    dims: Any = node.args[1:]
    if node.target is aten.permute.default:
        return [dim % value.ndim for dim in dims[0]] == swapped
    if node.target is aten.transpose.int:
        return {dim % value.ndim for dim in dims} == set(swapped[-2:])
    return node.target is aten.t.default and value.ndim == 2


def _transpose(graph: Graph, side: Node, before: Node) -> Node:
    value = side.meta["val"]
    order = [*range(value.ndim - 2), value.ndim - 1, value.ndim - 2]
    with graph.inserting_before(before):
        node = graph.call_function(aten.permute.default, (side, order))
    node.meta = {**side.meta, "val": value.permute(order)}
    return node
