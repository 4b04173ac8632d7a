"""The one walk over a live graph that everything here uses: without recursion, so any depth will do."""

from __future__ import annotations

from typing import Any

LiveNode = Any  # torch.autograd.graph.Node says nothing of _raw_saved_… and variable


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
    return order
