"""What a plan is: which gradients wait, and for what the engine is asked in I. ``_planner.py`` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from torch.autograd.function import BackwardCFunction

from sternway._torch.nodes import ACCUMULATE_GRAD
from sternway.split._part import Cut, Edge, Node, Part
from sternway.split.learned._cut import FunctionCut

if TYPE_CHECKING:
    from sternway.split.eager._native import NativeCuts


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
        functions: custom Functions whose backward is called in two parts.
        trials: custom Functions that are computed whole, and may be tried as they run.
        ready: leaves whose whole gradient I computes.
        inputs: inputs that gradient reaches without passing another one.
        opaque: compiled graphs.
        branches: where a part of the graph begins that leads to no input. I computes the gradient there; W, the rest.
        recomputes: whether W goes through what a checkpoint recomputes in I.
        triggers: a leaf for each compiled graph with nothing but leaves below it. The engine is asked for its gradient,
            or it would not run the graph.
        is_quiet: whether there are no hooks at the cuts, and nothing that I runs could put some there.
        native: cuts that the extension in C++ reads, beside ``cuts``; it takes the gradients of ``ready``, too.
    """

    cuts: list[Cut]
    ready: list[Node]
    inputs: list[Edge]
    opaque: list[OpaqueNode]
    branches: list[Part]
    recomputes: bool
    triggers: list[Node]
    functions: list[FunctionCut]
    trials: list[FunctionCut]
    is_quiet: bool
    native: NativeCuts | None = None

    @property
    def leads_to_functions(self) -> bool:
        """Whether a part of W begins at the node of a custom Function."""
        parts = chain(self.branches, *(cut.parts for cut in (*self.cuts, *self.functions)))
        return any(isinstance(part.edge[0], BackwardCFunction) for part in parts)

    @property
    def inner(self) -> list[Edge]:
        """Inputs inside the graph, where gradient is stopped even if something below needs it."""
        return [edge for edge in self.inputs if type(edge[0]) is not ACCUMULATE_GRAD]
