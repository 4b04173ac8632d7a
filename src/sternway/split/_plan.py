"""Which gradients can wait: one walk over the autograd graph, before anything is computed.

        outputs
           │
        [1] gelu                  the spine: every node that gradient must pass on its way down
           │
        [2] addmm ──── t ──▶ W    a cut: a spine node with a weight on one side. I does not follow the edge to the
           │    └──────────▶ b    weight; a rule computes that side in W
        [3] norm ─────────▶ w     no rule: computed in I with the norm itself; w is ready, W only accumulates it
           │
        inputs

The spine is what the walk reaches from the outputs without crossing a deferred edge. It ends at the inputs and at ready
weights. Stage 0 of a pipeline has no input that needs a gradient; its spine ends at its lowest cuts.

An edge can be deferred if its operand has a rule and only parameters lie behind it. In stage 0 that is true of
activations too, so the shape of what is behind decides: a chain from a parameter (views, casts, arithmetic) is a
weight; something with matrix products of its own is an activation, unless it stands where weights stand
(``W + A @ B`` as the right side of a product).

A compiled graph is one *opaque* node, which knows itself which of the leaves behind it can wait. The plan lists it, and
keeps those leaves off the spine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd.function import BackwardCFunction

from sternway._torch import require
from sternway._torch.autograd import gradient_slots
from sternway._torch.compile import COMPILED_NODE
from sternway._torch.nodes import ACCUMULATE_GRAD, TO_COPY, TRANSPOSE, T
from sternway._torch.parallel import in_process_group
from sternway.split._part import Cut, Edge, Node, Packing, Part, is_transpose, packing
from sternway.split._rules import RULES, Operand, Operands
from sternway.split._unseen import UNSEEN
from sternway.split._unsupported import UNSUPPORTED, refuse_spent


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
        triggers: a leaf for each compiled graph with nothing but leaves below it. The engine is asked for its gradient,
            or it would not run the graph.
    """

    cuts: list[Cut]
    ready: list[Node]
    inputs: list[Edge]
    opaque: list[OpaqueNode]
    triggers: list[Node]

    @property
    def inner(self) -> list[Edge]:
        """Inputs inside the graph, where gradient is stopped even if something below needs it."""
        return [edge for edge in self.inputs if type(edge[0]) is not ACCUMULATE_GRAD]


def make_plan(roots: Iterable[Edge], inputs: set[Edge]) -> SplitPlan:
    """Plan the split of the graph between ``roots`` and ``inputs``."""
    require("split")
    if in_process_group():
        require("split.parallel")
    UNSEEN.look()
    planner = _Planner(inputs)
    starts = list(roots)
    planner.reached.update(inputs.intersection(starts))
    planner.walk([node for node, index in starts if (node, index) not in inputs])
    planner.settle()
    triggers = planner.triggers()
    cuts, reached = [cut for cut in planner.cuts if cut.parts], planner.reached
    return SplitPlan(cuts, planner.ready, [edge for edge in inputs if edge in reached], planner.opaque, triggers)


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
        if kind is T or (kind is TRANSPOSE and is_transpose(node)):
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


class _Planner:
    def __init__(self, inputs: set[Edge]) -> None:
        self.inputs = inputs
        self.input_nodes = {node for node, _ in inputs}
        self.kinds: dict[type, Operands | None] = {}  # by node type: its name is made anew each time it is asked for
        self.chains: dict[Node, bool] = {}
        self.from_inputs: dict[Node, bool] = {}
        self.not_recomputed: set[Node] = set()
        self.spine: set[Node] = set()
        self.reached: set[Edge] = set()
        self.ready: list[Node] = []
        self.cuts: list[Cut] = []
        self.opaque: list[OpaqueNode] = []
        self.opaque_kinds: set[type] = set()

    def settle(self) -> None:
        """Put deferred edges back on the spine where I reaches what lies behind them in another way.

        A node runs once, and the engine computes every path to a leaf that it is asked for. So such an edge cannot be
        deferred. Walking it extends the spine, which may reach what lies behind other edges.
        """
        spine = self.spine
        while clashes := [
            (cut, part)
            for cut in self.cuts
            for part in cut.parts
            if (part.leaf in spine if part.leaf is not None else self.on_spine(part.edge))
        ]:
            for cut, part in clashes:
                cut.parts.remove(part)
                cut.runs_in_i = True
            self.walk([part.edge[0] for _, part in clashes])

    def triggers(self) -> list[Node]:
        """For each compiled graph with nothing but leaves below it, one of the leaves that no cut defers."""
        found = []
        for opaque in self.opaque:
            if len([1 for child, _ in opaque.node.next_functions if child is not None]) == len(opaque.positions):
                late = {leaf for cut in self.cuts for part in cut.parts for leaf in part.leaves()}
                free = [leaf for leaf in opaque.leaves if leaf not in late]
                if not free:
                    self.walk([opaque.leaves[0]])
                    self.settle()
                found += free[:1]
        return found

    def walk(self, stack: list[Node]) -> None:
        """Extend the spine from ``stack`` downwards."""
        spine, inputs, input_nodes, kinds = self.spine, self.inputs, self.input_nodes, self.kinds
        while stack:
            node = stack.pop()
            if node in spine:
                continue
            spine.add(node)
            kind = type(node)
            if kind is ACCUMULATE_GRAD:
                self.ready.append(node)
                continue
            edges: Sequence[Edge] = node.next_functions
            operands = kinds[kind] if kind in kinds else self.look_up(kind, node)
            if operands is not None:
                edges = self.cut(node, edges, operands)
            elif kind in self.opaque_kinds:
                edges = self.past_leaves(node, edges)
            for edge in edges:
                child = edge[0]
                if child is None:
                    continue
                if child in input_nodes and edge in inputs:
                    self.reached.add(edge)
                else:
                    stack.append(child)

    def look_up(self, kind: type, node: Node) -> Operands | None:
        """The rules for a kind of node, if any; raises SplitError for one that cannot be split."""
        name = kind.__name__
        if name == COMPILED_NODE:
            self.opaque_kinds.add(kind)
        if name in UNSUPPORTED:
            UNSUPPORTED[name](node)
        elif not issubclass(kind, BackwardCFunction):
            self.kinds[kind] = RULES.get(name)
        elif len(gradient_slots(node)) != 1:
            return None  # a rule is for nodes with one output, and each of a custom Function's may have another number
        return RULES.get(name)

    def past_leaves(self, node: Node, edges: Sequence[Edge]) -> list[Edge]:
        """The edges of a compiled graph that I follows: not those to leaves that are no inputs, which it sees to."""
        inputs = self.inputs
        positions = [i for i, edge in enumerate(edges) if type(edge[0]) is ACCUMULATE_GRAD and edge not in inputs]
        if positions:
            self.opaque.append(OpaqueNode(node, positions))
        return [edge for edge in edges if type(edge[0]) is not ACCUMULATE_GRAD or edge in inputs]

    def cut(self, node: Node, edges: Sequence[Edge], operands: Operands) -> Sequence[Edge]:
        """Make the node a cut, if some of its operands can be deferred; the edges that I follows."""
        packed = packing(node)
        if packed is Packing.FOREIGN or UNSEEN.on_node(node):  # hooks on it expect the gradients of all operands
            return edges
        parts = (
            self.chains_of(operands.weights, edges)
            or self.chains_of(operands.lefts, edges)
            or self.first_from_parameters(operands.weights + operands.lefts, edges)
        )
        if not parts:
            return edges
        parts += self.chains_of(operands.biases, edges)
        deferred = [part.position for part in parts]
        followed = [edge for place, edge in enumerate(edges) if edge[0] is not None and place not in deferred]
        if packed is Packing.CHECKPOINT and not followed:
            return edges  # what a checkpoint recomputes can be read only when the node runs
        if not followed:
            refuse_spent(node)
        self.cuts.append(Cut(node, parts, packed, runs_in_i=bool(followed)))
        return followed

    def chains_of(self, operands: tuple[Operand, ...], edges: Sequence[Edge]) -> list[Part]:
        """The operands that are plain chains from parameters."""
        parts = []
        for operand in operands:
            if operand.position < len(edges) and (edge := edges[operand.position])[0] is not None:
                leaf, transposed = direct_target(edge, self.input_nodes)
                if leaf is not None or (self.is_chain(edge) and not self.is_recomputed(edge)):
                    parts.append(Part(edge, leaf, transposed, operand.position, operand.function))
        return parts

    def first_from_parameters(self, operands: tuple[Operand, ...], edges: Sequence[Edge]) -> list[Part]:
        """The first operand that depends on no input, such as ``W + A @ B``."""
        for operand in operands:
            edge = edges[operand.position] if operand.position < len(edges) else (None, 0)
            if edge[0] is not None and not self.leads_to_input(edge) and not self.is_recomputed(edge):
                return [Part(edge, None, False, operand.position, operand.function)]
        return []

    def is_chain(self, edge: Edge) -> bool:
        """Whether only parameters lie behind ``edge``, with no node on the way that has a rule."""
        if edge in self.inputs:
            return False
        known = self.chains
        stack, seen, chain = [edge[0]], {edge[0]}, True
        while stack and chain:
            node = stack.pop()
            if node in known:
                chain = known[node]
                continue
            below = [next_edge for next_edge in node.next_functions if next_edge[0] is not None]
            chain = type(node).__name__ not in RULES and self.inputs.isdisjoint(below)
            new = {child for child, _ in below} - seen
            seen |= new
            stack += new
        if chain:
            known.update(dict.fromkeys(seen, True))
        else:
            known[edge[0]] = False
        return chain

    def is_recomputed(self, edge: Edge) -> bool:
        """Whether W, going through what lies behind ``edge``, would make a checkpoint recompute again."""
        stack, seen = [edge[0]], {edge[0]}
        while stack:
            node = stack.pop()
            if node in self.not_recomputed:
                continue
            if packing(node) is Packing.CHECKPOINT:
                return True
            new = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= new
            stack += new
        self.not_recomputed |= seen
        return False

    def leads_to_input(self, edge: Edge) -> bool:
        """Whether an input lies behind ``edge``: depth first, without recursion, each node visited once."""
        if edge in self.inputs:
            return True
        known = self.from_inputs
        stack = [edge[0]]
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            below = [next_edge for next_edge in node.next_functions if next_edge[0] is not None]
            inner = [child for child, index in below if (child, index) not in self.inputs]
            if unknown := [child for child in inner if child not in known]:
                stack += unknown
            else:
                known[node] = len(inner) < len(below) or any(known[child] for child in inner)
        return known[edge[0]]

    def on_spine(self, edge: Edge) -> bool:
        """Whether something behind the edge is on the spine."""
        stack, seen = [edge[0]], {edge[0]}
        while stack:
            node = stack.pop()
            if node in self.spine:
                return True
            new = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= new
            stack += new
        return False
