"""The one walk over a live graph that everything here uses: without recursion, so any depth will do.

Depth has a second trap. torch frees a graph without recursion too, but (since 2.12 or so) not a node that Python has
seen: its Python object lives as long as the node, and lets go of it in a nested call. A chain of 100,000 nodes that was
walked, by whomever, overflows the C stack when it is freed. So a deep graph gets *rungs*: every few
thousand nodes of depth, a node holds all further rungs below it in its dictionary, and so do the roots. torch drops a
node's dictionary after it has freed what lies below the node, so that the freeing comes back up at each rung before it
goes on. A rung keeps nothing alive that its node does not.
"""

from __future__ import annotations

from typing import Any

LiveNode = Any  # torch.autograd.graph.Node says nothing of _raw_saved_… and variable

_RUNG = 4_000  # nodes between rungs; 8 MiB of stack are enough for about 50,000
_KEY = "sternway rungs"


def forward_order(roots: list[LiveNode]) -> list[LiveNode]:
    """Every node behind ``roots``, each after all that it leads to."""
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
    """Let each rung, and each root, hold the rungs that it leads to."""
    depth: dict[LiveNode, int] = {}
    rungs: dict[LiveNode, frozenset[int]] = {}  # by place in the order; most nodes share their child's set
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
            # A list is emptied from its end, and the order is that of the forward: from the top downwards.
            node.metadata[_KEY] = [order[rung] for rung in sorted(found)]
        rungs[node] = found | {index} if is_rung else found
