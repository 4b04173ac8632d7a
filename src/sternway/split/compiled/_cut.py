"""Which of a backward graph's nodes go to I, which to W, and what is held between.

        tangents, saved                I is what the input gradients need: the spine. W is the rest: the products that
              │                        make weight gradients, and whatever leads from the spine to them.
         [1] mm ─────────┐
              │          │             What W needs of the spine is held, and held memory is what a pipeline runs out
         [2] gelu'·g ── [3] mm ──▶ W   of. So the boundary is a minimum cut: each value costs its bytes, a parameter
              │                        nothing, and of equal cuts the one nearest to W is taken.
         [4] mm
              │
        input gradients

- A spine node that is one cheap pass (a view, a cast, a sum of two) may be computed again in W, from what is held.
  A product, a random number or an operator that we do not know never is.
- What leads only to weights is computed once, in I or in W, wherever fewer bytes are held. So a bias waits with its
  weight, whose output gradient is held anyway; a norm's weight gradient, for which alone two activations would be
  held, is computed in I.
- The last product on the way to a weight is always in W: deferring it is what the cut is for.
- A collective is always in I, in which all ranks run them in the same order. So is what it is given.
- A first stage has no input gradient. Its spine is every product that another product needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx  # type: ignore[import-untyped]  # torch's own dependency
import torch
from torch.fx import Graph, Node

from sternway._torch.compile import example_value
from sternway.split.compiled._extract import between
from sternway.split.compiled._ops import collectives, effects, is_cheap, is_costly, is_tuple, is_view, nbytes


@dataclass(frozen=True, slots=True)
class Halved:
    """Where a backward graph is cut."""

    held: tuple[Node, ...]  # what crosses from I to W: placeholders, and nodes that I computes
    early: frozenset[Node]  # weight gradients that I computes; they are held too, and need no W


def spine_of(graph: Graph, weights: Iterable[Node], inputs: Iterable[Node]) -> tuple[set[Node], list[Node]]:
    """What I must compute, and the products of W: those that no other product of W needs.

    Args:
        graph: a backward graph, or a joint one.
        weights: the nodes of the weight gradients.
        inputs: those of all other outputs.
    """
    spine = between([*inputs, *effects(graph)], set())
    is_first = not any(is_costly(node) for node in spine)
    spine |= between(collectives(graph), set())
    side = between(weights, set()) - spine
    last: list[Node] = []
    leads_on: set[Node] = set()  # side nodes that a costly side node needs
    for node in reversed(graph.nodes):
        if node in side:
            if any(user in leads_on or (user in side and is_costly(user)) for user in node.users):
                leads_on.add(node)
            elif is_costly(node):
                last.append(node)
    if is_first:
        spine |= between((node for node in leads_on if is_costly(node)), set())
    return spine, last


def halve(graph: Graph, weights: list[Node], inputs: list[Node], free: set[Node]) -> Halved:
    """Cut a backward graph so that the fewest bytes are held between I and W.

    Args:
        graph: the backward graph.
        weights: the nodes of the weight gradients that may wait.
        inputs: the nodes of all other outputs.
        free: placeholders that are there anyway, such as parameters.
    """
    spine, last = spine_of(graph, weights, inputs)
    needed = between(weights, set())
    side = needed - spine
    network = networkx.DiGraph()
    for node in needed:
        begin, end = (node, "in"), (node, "out")
        if is_view(node) or is_tuple(node) or node.op == "get_attr":
            network.add_edge(begin, end)  # never held as such: what it shows is
        else:
            network.add_edge(begin, end, capacity=0 if node in free else nbytes(example_value(node)))
        if node.op == "placeholder" or (node in spine and not is_cheap(node)):
            network.add_edge("I", begin)
        for source in node.all_input_nodes:
            network.add_edge((source, "out"), begin)
            if node in side and source in side:
                network.add_edge(begin, (source, "in"))  # computed once: in I only if all that it needs is
    for node in last:
        network.add_edge((node, "in"), "W")
    for node in weights:
        network.add_edge((node, "out"), "W")
    if "I" not in network:  # weight gradients made of nothing
        return Halved((), frozenset())
    _, (before, after) = networkx.minimum_cut(network, "I", "W")

    held = [node for node in graph.nodes if (node, "in") in before and (node, "out") in after]
    early = set()
    for node in weights:
        root = node
        while is_view(root):
            root = root.all_input_nodes[0]
        if root in held and root.op != "placeholder":
            early.add(node)
    used = set().union(*(between([node], set(held)) for node in weights if node not in early))
    return Halved(tuple(node for node in held if node in used), frozenset(early))


def split_masked(graph: Graph) -> None:
    """Make two nodes of each convolution's backward that computes both gradients in one, so that one can wait."""
    target = torch.ops.aten.convolution_backward.default
    for node in graph.find_nodes(op="call_function", target=target):
        mask = list(node.args[10])
        by_item = {user.args[1]: user for user in node.users}
        if not (mask[0] and 0 in by_item and (mask[1] or mask[2])):
            continue
        value = node.meta["val"]
        with graph.inserting_after(node):
            twin = graph.call_function(target, (*node.args[:10], [False, *mask[1:]]))
        twin.meta = {**node.meta, "val": (None, *value[1:])}
        node.update_arg(10, [True, False, False])
        node.meta["val"] = (value[0], None, None)
        for item in (1, 2):
            if item in by_item:
                by_item[item].replace_input_with(node, twin)
