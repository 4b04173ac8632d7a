"""What the split would do with a graph, as the split's own planner says."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge

from sternway import split
from sternway._torch.nodes import ACCUMULATE_GRAD
from sternway.errors import SplitError
from sternway.graph._records import Node, SplitPreview, Waiting


def preview(roots: list[GradientEdge], order: list[Any], nodes: list[Node]) -> SplitPreview:
    """Leaves that are not parameters count as the stage's inputs."""
    numbers = {node: index for index, node in enumerate(order)}
    inputs = [
        GradientEdge(node, 0)
        for node in order
        if type(node) is ACCUMULATE_GRAD and not isinstance(node.variable, nn.Parameter)
    ]

    def name(leaf: Any) -> str:
        return nodes[numbers[leaf]].parameter or f"leaf {numbers[leaf]}"

    try:
        found = split.preview(roots, inputs)
    except SplitError as refusal:
        return SplitPreview((), (), refused=str(refusal))
    waits = []
    for each in found.deferred:
        node = nodes[numbers[each.node]]
        waits.append(Waiting(node.id, node.kind, node.module, tuple(dict.fromkeys(map(name, each.leaves)))))
    return SplitPreview(tuple(waits), tuple(sorted(map(name, found.ready))))
