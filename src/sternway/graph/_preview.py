"""What the split would do with a graph, asked of the split's own planner."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge

from sternway import split as _split  # noqa: F401 - fills the table of rules
from sternway.errors import SplitError
from sternway.graph._records import Node, SplitPreview, Waiting
from sternway.split._plan import make_plan


def preview(roots: list[GradientEdge], order: list[Any], nodes: list[Node]) -> SplitPreview:
    """Leaves that are not parameters count as the stage's inputs."""
    numbers = {node: index for index, node in enumerate(order)}
    inputs = {
        (node, 0)
        for node in order
        if type(node).__name__ == "AccumulateGrad" and not isinstance(node.variable, nn.Parameter)
    }

    def name(leaf: Any) -> str:
        return nodes[numbers[leaf]].parameter or f"leaf {numbers[leaf]}"

    try:
        plan = make_plan([(edge.node, edge.output_nr) for edge in roots], inputs)
    except SplitError as refusal:
        return SplitPreview((), (), refused=str(refusal))
    waits = []
    for cut in plan.cuts:
        behind = dict.fromkeys(name(leaf) for part in cut.parts for leaf in part.leaves())
        node = nodes[numbers[cut.node]]
        waits.append(Waiting(node.id, node.kind, node.module, tuple(behind)))
    ready = dict.fromkeys([*plan.ready, *(leaf for compiled in plan.compiled for leaf in compiled.leaves)])
    return SplitPreview(tuple(waits), tuple(sorted(map(name, ready))))
