"""What a plan is: which gradients wait, and for what the engine is asked in I. ``_planner.py`` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from sternway._torch.autograd import gradient_slots
from sternway._torch.nodes import ACCUMULATE_GRAD, TO_COPY, TRANSPOSE, T, signed, transposed_dims
from sternway.split._part import Cut, Edge, Node, Part
from sternway.split._unseen import UNSEEN


@dataclass(frozen=True, slots=True)
class OpaqueNode:
    """The node of a compiled graph, and which of its edges lead straight to leaves."""

    node: Node
    positions: list[int]

    @property
    def leaves(self) -> list[Node]:
        edges = self.node.next_functions
        return [edges[position][0] for position in self.positions]


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What I does. A leaf is the AccumulateGrad node of a parameter.

    Attributes:
        cuts: nodes at which I keeps what W needs.
        ready: leaves whose whole gradient I computes.
        inputs: inputs that gradient reaches without passing another one.
        opaque: compiled graphs.
        branches: where a part of the graph begins that leads to no input. I computes the gradient there; W, the rest.
        recomputes: whether W goes through what a checkpoint recomputes in I.
        triggers: a leaf for each compiled graph with nothing but leaves below it. The engine is asked for its gradient,
            or it would not run the graph.
    """

    cuts: list[Cut]
    ready: list[Node]
    inputs: list[Edge]
    opaque: list[OpaqueNode]
    branches: list[Part]
    recomputes: bool
    triggers: list[Node]

    @property
    def inner(self) -> list[Edge]:
        """Inputs inside the graph, where gradient is stopped even if something below needs it."""
        return [edge for edge in self.inputs if type(edge[0]) is not ACCUMULATE_GRAD]


def direct_target(edge: Edge, stop_at: set[Node]) -> tuple[Node | None, bool]:
    """The leaf that ``edge`` leads to through transposes and casts alone, not passing ``stop_at`` or hooks.

    Beside it, whether the leaf's parameter (unless a vector) is the transpose of the operand at the edge.
    """
    node, transposed, cast = edge[0], False, False
    while node not in stop_at:
        kind = type(node)
        if kind is ACCUMULATE_GRAD:
            return node, transposed
        if not UNSEEN.beyond(node):
            break  # there may be a hook on what it made
        if kind is T or (kind is TRANSPOSE and _swaps_last_two(node)):
            transposed = not transposed
        elif kind is TO_COPY and not cast and _changes_precision_only(node):
            cast = True  # a second one might round in between
        else:
            break
        node = node.next_functions[0][0]
    return None, False


def _changes_precision_only(node: Node) -> bool:
    child, index = node.next_functions[0]
    after, before = gradient_slots(node)[0], gradient_slots(child)[index]
    return bool(after.device == before.device and after.dtype.is_complex == before.dtype.is_complex)


def _swaps_last_two(node: Node) -> bool:
    ndim = len(gradient_slots(node)[0].shape)
    return {signed(dim) % ndim for dim in transposed_dims(node)} == {ndim - 2, ndim - 1}
