"""Branches: parts of a graph that lead to no input, though others do.

        hidden                       a decoder's first layer, what conditions a diffusion model, learned queries:
          │                          nothing waits for their gradients, so that all of them are W's work
        [1] add ────────┐
          │             │ [2]        I computes the gradient at [2], where the branch leaves the spine, and W goes
        [3] norm      attention      through the branch with it
          │             │
        input       embedding ──▶ w

A branch without a product in it stays in I: the weight of a norm, or what is made of it. One that is a single cut, such
as an embedding, needs no more than its rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sternway.split._part import Cut, Edge, Node
from sternway.split._unsupported import UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Branches:
    """Where the spine divides.

    Attributes:
        leading: the nodes that lead to an input.
        heavy: edges from these, and roots, that lead to products but to no input.
        light: edges that lead to neither.
    """

    leading: set[Node]
    heavy: list[Edge]
    light: list[Edge]


def find_branches(
    spine: Mapping[Node, Sequence[Edge]], roots: Iterable[Edge], inputs: set[Edge], cuts: Sequence[Cut]
) -> Branches | None:
    """The branches of a spine, each of whose nodes comes with the edges that I follows; None if it has none."""
    parents: dict[Node, list[Node]] = {}
    at_inputs = []
    for node, edges in spine.items():
        for edge in edges:
            if edge in inputs:
                at_inputs.append(node)
            elif edge[0] in parents:
                parents[edge[0]].append(node)
            else:
                parents[edge[0]] = [node]
    leading = _above(at_inputs, parents)
    idle = [cut.node for cut in cuts if cut.node not in leading]
    if not idle:
        return None
    with_products = _above(idle, parents) - {cut.node for cut in cuts if not cut.runs_in_i}
    barred = _above([node for node in spine if type(node).__name__ in UNSUPPORTED], parents)
    leaving = [edge for node, edges in spine.items() if node in leading for edge in edges]
    heavy: dict[Edge, None] = {}
    light: dict[Edge, None] = {}
    for edge in (*roots, *leaving):
        node = edge[0]
        if node is not None and node not in leading and edge not in inputs:
            (heavy if node in with_products and node not in barred else light)[edge] = None
    return Branches(leading, list(heavy), list(light))


def _above(nodes: Iterable[Node], parents: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """The nodes, and all from which they are reached."""
    stack, found = list(nodes), set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += parents.get(node, ())
    return found
