"""Where an edge leads on the weight's side: straight to one parameter, or into a graph of its own."""

from __future__ import annotations

from typing import Any

import torch

_types: Any = torch._C._functions  # the node types: a type's name is made anew each time that it is asked for
AccumulateGrad: type = _types.AccumulateGrad
Node = Any  # torch.autograd.graph.Node says nothing of _saved_…, variable and _input_metadata
Edge = tuple[Node, int]


def direct_target(edge: Edge, stop_at: set[Node]) -> tuple[Node | None, bool]:
    """The leaf that ``edge`` leads to through transposes and casts alone, not passing ``stop_at``.

    Beside it, whether the leaf's parameter (unless a vector) is the transpose of what the edge is for.
    """
    node, transposed, cast = edge[0], False, False
    while node not in stop_at:
        kind = type(node)
        if kind is AccumulateGrad:
            return node, transposed
        if kind is _types.TBackward0 or (kind is _types.TransposeBackward0 and _swaps_last_two(node)):
            transposed = not transposed
        elif kind is _types.ToCopyBackward0 and not cast and _changes_precision_only(node):
            cast = True  # a second one might round in between
        else:
            break
        node = node.next_functions[0][0]
    return None, False


def leaves_behind(edge: Edge) -> list[Node]:
    """Every leaf that ``edge`` leads to."""
    found: dict[Node, None] = {}
    stack, seen = [edge[0]], {edge[0]}
    while stack:
        node = stack.pop()
        if type(node) is AccumulateGrad:
            found[node] = None
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        stack += new
    return list(found)


def _changes_precision_only(node: Node) -> bool:
    child, index = node.next_functions[0]
    after, before = node._input_metadata[0], child._input_metadata[index]
    return after.device == before.device and after.dtype.is_complex == before.dtype.is_complex  # type: ignore[no-any-return]


def _swaps_last_two(node: Node) -> bool:
    ndim = len(node._input_metadata[0].shape)
    return {signed(dim) % ndim for dim in (node._saved_dim0, node._saved_dim1)} == {ndim - 2, ndim - 1}


def signed(number: int) -> int:
    """A saved integer as it was passed: nodes show negative ones as unsigned 64-bit numbers."""
    return (number + 2**63) % 2**64 - 2**63
