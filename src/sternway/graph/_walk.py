"""The walk over a live graph that this room uses: without recursion, so graphs may be of any depth.

Freeing a deep graph can also overflow the C stack. torch frees a graph without recursion, but (since about 2.12) not
nodes that Python has seen: such a node has a Python object, which releases the next node in a nested call. A chain of
100,000 nodes crashes when it is freed after any Python code has walked it. So a deep graph gets *rungs*: every few
thousand nodes of depth, a node refers to all rungs below it in its metadata dictionary, and so do the roots. torch
clears a node's dictionary after it has freed what is below the node, so the nested calls return at each rung. A rung
keeps nothing alive that its node does not keep alive anyway.
"""

from __future__ import annotations

from typing import Any

from sternway._torch.nodes import ACCUMULATE_GRAD

LiveNode = Any  # torch.autograd.graph.Node does not declare `variable` and `metadata`

_RUNG = 4_000  # nodes between rungs; 8 MiB of stack are enough for about 50,000
_KEY = "sternway rungs"


def is_leaf(node: LiveNode) -> bool:
    """Whether a node is the one at which a leaf's gradient arrives; the leaf is its ``variable``."""
    return type(node) is ACCUMULATE_GRAD


def forward_order(roots: list[LiveNode]) -> list[LiveNode]:
    """Every node behind ``roots``, each after the nodes that made its inputs."""
    order: list[LiveNode] = []
    done: set[LiveNode] = set()
    opened: set[LiveNode] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        if node in opened:
            stack.pop()
            if node not in done:
                done.add(node)
                order.append(node)
            continue
        opened.add(node)
        stack += [child for child, _ in reversed(node.next_functions) if child is not None and child not in opened]
    if len(order) > 2 * _RUNG:
        _set_rungs(order, roots)
    return order


def _set_rungs(order: list[LiveNode], roots: list[LiveNode]) -> None:
    """Let each rung, and each root, refer to the rungs below it."""
    depth: dict[LiveNode, int] = {}
    rungs: dict[LiveNode, frozenset[int]] = {}  # by index in the order; most nodes share their child's set
    for index, node in enumerate(order):
        below, found = 0, frozenset[int]()
        for child, _ in node.next_functions:
            if child is not None:
                below = max(below, depth[child])
                theirs = rungs[child]
                found = theirs if found <= theirs else found if theirs <= found else found | theirs
        depth[node] = below + 1
        is_rung = depth[node] % _RUNG == 0
        if found and (is_rung or node in roots):
            # A list is cleared from its end, and the order is that of the forward: so from the loss downwards.
            node.metadata[_KEY] = [order[rung] for rung in sorted(found)]
        rungs[node] = found | {index} if is_rung else found
