"""What the split would do with a graph; nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sternway.split._part import Node
from sternway.split._places import edges_of
from sternway.split._planner import make_plan


@dataclass(frozen=True, slots=True)
class DeferredNode:
    """A node of the graph whose weight gradients wait, and the leaves (AccumulateGrad nodes) that they are for.

    Where a branch leads to no input, it is the node at which W begins.
    """

    node: Node
    leaves: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What ``backward_input`` would defer, and the leaves whose gradient it would compute at once.

    What compiled graphs will defer is decided as they run; their leaves are among the ready ones here.
    """

    deferred: tuple[DeferredNode, ...]
    ready: tuple[Node, ...]


def preview(outputs: Any, inputs: Any = ()) -> Preview:
    """Say what ``backward_input(outputs, …, inputs)`` would defer; nothing is computed or changed.

    Example:
        >>> from sternway import split
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> [type(each.node).__name__ for each in split.preview(layer(x), x).deferred]
        ['AddmmBackward0']

    Args:
        outputs: tensors or ``GradientEdge``s, nested as for ``backward_input``.
        inputs: where gradient stops.

    Raises:
        SplitError: the backward cannot be split.
    """
    plan = make_plan(edges_of(outputs, "outputs").values(), set(edges_of(inputs, "inputs").values()))
    waiting = [(cut.node, cut.parts) for cut in (*plan.cuts, *plan.functions)] + [
        (part.edge[0], [part]) for part in plan.branches
    ]
    deferred = tuple(
        DeferredNode(node, tuple(dict.fromkeys(leaf for part in parts for leaf in part.leaves())))
        for node, parts in waiting
    )
    ready = dict.fromkeys([*plan.ready, *(leaf for opaque in plan.opaque for leaf in opaque.leaves)])
    return Preview(deferred, tuple(ready))
