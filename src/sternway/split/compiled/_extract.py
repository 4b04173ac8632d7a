"""A part of a graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch.fx import Graph, GraphModule, Node

from sternway._torch.compile import keep_strides


def extract(
    module: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    name: str,
    *,
    effects: Sequence[Node] = (),
    strided: Collection[Node] = (),
) -> GraphModule:
    """The nodes that lead from ``inputs`` to ``outputs`` and ``effects``, in their order.

    ``inputs`` become placeholders. The new module shares constants with the old. Results that are in ``strided`` keep
    the graph's strides when it is compiled; of others the compiler may choose them.
    """
    known: dict[Node, Node] = {}
    graph = Graph()
    for node in inputs:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    wanted = between([*outputs, *effects], set(inputs))
    for node in module.graph.nodes:
        if node in wanted and node not in known:
            known[node] = graph.node_copy(node, lambda argument: known[argument])
    output = graph.output(tuple(known[node] for node in outputs))
    keep_strides(output, [index for index, node in enumerate(outputs) if node in strided])
    graph.lint()
    return GraphModule(module, graph, class_name=name)


def between(outputs: Iterable[Node], inputs: set[Node]) -> set[Node]:
    """The nodes that ``outputs`` are computed from, themselves included, going back no further than ``inputs``."""
    stack = list(outputs)
    found = set(stack)
    while stack:
        node = stack.pop()
        if node not in inputs:
            new = set(node.all_input_nodes) - found
            found |= new
            stack += new
    return found
