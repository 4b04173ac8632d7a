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
activations too, so what is behind decides: something made of parameters alone (``W + A @ B``) is a weight; something
that data goes into, by a product or a lookup, is an activation.

What leads to no input, though an input is there, is W's work whole: ``_branches.py`` finds it after the walk.

A compiled graph is one *opaque* node, which knows itself which of the leaves behind it can wait; so is a captured
module. The plan lists it, and keeps those leaves off the spine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch.autograd.function import BackwardCFunction

from sternway._torch import require
from sternway._torch.autograd import gradient_slots, sequence_number
from sternway._torch.compile import COMPILED_NODE
from sternway._torch.functions import function_of
from sternway._torch.nodes import ACCUMULATE_GRAD, packed_by_hooks, unpack_hooks
from sternway._torch.parallel import in_process_group
from sternway._torch.saved_hooks import can_share_recomputation
from sternway.split._behind import meets
from sternway.split._branches import find_branches
from sternway.split._deferrable import Deferrable
from sternway.split._part import Cut, Edge, Node, Packing, Part, packing, packing_of
from sternway.split._plan import OpaqueNode, SplitPlan
from sternway.split._rules import RULES, Operands
from sternway.split._unseen import UNSEEN
from sternway.split._unsupported import UNSUPPORTED, refuse_spent
from sternway.split.learned._cut import FunctionCut, function_cut
from sternway.split.learned._record import record_of

_NOWHERE: Edge = (None, 0)


class _Kind(NamedTuple):
    """A kind of node that has rules, and how to see that nothing packed what such a node saved."""

    operands: Operands
    read: Callable[[Node], tuple[Any, ...]]  # its unpack hooks
    unpacked: tuple[Any, ...]  # what that gives where there are none


_UNKNOWN = _Kind(Operands(), lambda node: (), ())
"""Of a kind of node that the walk has not met yet, or each node of which is looked at anew."""
_OPAQUE = (COMPILED_NODE, "CapturedCallBackward")  # the latter: captured/_call.py


def make_plan(roots: Iterable[Edge], inputs: set[Edge], exact: bool = False) -> SplitPlan:
    """Plan the split of the graph between ``roots`` and ``inputs``.

    With ``exact``, branches stay in I: where one shares a parameter with a cut, W would add in another order.
    """
    require("split")
    if in_process_group():
        require("split.parallel")
    UNSEEN.look()
    planner = _Planner(inputs, exact)
    starts = list(roots)
    planner.reached.update(inputs.intersection(starts))
    planner.walk([node for node, index in starts if (node, index) not in inputs])
    if not exact:
        planner.set_aside(starts)
    planner.settle()
    triggers = planner.triggers()
    cuts, reached = [cut for cut in planner.cuts if cut.parts], planner.reached
    functions: list[FunctionCut] = []
    if planner.function_kinds:
        functions = [cut for cut in cuts if isinstance(cut, FunctionCut)]
        cuts = [cut for cut in cuts if not isinstance(cut, FunctionCut)]
    places = [edge for edge in inputs if edge in reached]
    branches, trials = list(planner.branches.values()), planner.trials
    opaque, recomputes = planner.opaque, planner.deferrable.recomputes
    quiet = planner.is_quiet and not planner.function_kinds and not planner.opaque_kinds  # these run Python
    return SplitPlan(cuts, planner.ready, places, opaque, branches, recomputes, triggers, functions, trials, quiet)


class _Planner:
    def __init__(self, inputs: set[Edge], exact: bool) -> None:
        self.inputs = inputs
        self.exact = exact
        self.stops = set(inputs)  # and where branches begin
        self.stop_nodes = {node for node, _ in self.stops}
        self.deferrable = Deferrable(inputs)
        self.kinds: dict[type, _Kind | None] = {}  # by node type: its name is made anew each time it is asked for
        self.unhooked = UNSEEN.unhooked()
        self.spine: dict[Node, Sequence[Edge]] = {}  # with the edges that I follows
        self.has_ends = False  # nodes on the spine with nothing but leaves below them: a branch ends in one
        self.reached: set[Edge] = set()
        self.ready: list[Node] = []
        self.cuts: list[Cut] = []
        self.branches: dict[Edge, Part] = {}
        self.asked: set[Node] = set()  # where branches begin
        self.opaque: list[OpaqueNode] = []
        self.opaque_kinds: set[type] = set()
        self.function_kinds: set[type] = set()
        self.trials: list[FunctionCut] = []
        self.is_quiet = True

    def set_aside(self, roots: Sequence[Edge]) -> None:
        """Take the branches that lead to no input off the spine."""
        if not self.reached or not self.has_ends:
            return
        found = find_branches(self.spine, roots, self.inputs, self.cuts)
        if found is None:
            return
        for edge in found.heavy:
            # Hooks on what it made would run in I and in W.
            if UNSEEN.beyond(edge[0]) and self.deferrable.can_pass(edge):
                self.add_branch(edge)
        self.spine = {node: edges for node, edges in self.spine.items() if node in found.leading}
        self.cuts = [cut for cut in self.cuts if cut.node in found.leading]
        self.opaque = [opaque for opaque in self.opaque if opaque.node in found.leading]
        self.ready = []
        self.walk([edge[0] for edge in (*found.heavy, *found.light) if edge not in self.branches])

    def add_branch(self, edge: Edge) -> None:
        self.branches[edge] = Part(edge, None)
        self.asked.add(edge[0])
        self.stops.add(edge)
        self.stop_nodes.add(edge[0])

    def joins_branch(self, edge: Edge) -> bool:
        """Whether a branch begins at the node below ``edge``; then it begins at this edge too."""
        if edge[0] not in self.asked:
            return False
        self.add_branch(edge)
        return True

    def settle(self) -> None:
        """Put what was deferred back on the spine where I reaches what lies behind it in another way.

        A node runs once, and the engine computes every path to a place whose gradient it is asked for. So such an edge
        cannot be deferred. Walking it extends the spine, which may reach what lies behind other edges.
        """
        while True:
            spine, asked = self.spine, self.asked
            clashes = [
                (cut, part)
                for cut in self.cuts
                for part in cut.parts
                if (part.leaf in spine if part.leaf is not None else meets(part.edge, spine, asked))
            ]
            back = {node for node in asked if self.is_reached(node)}
            if not clashes and not back:
                return
            for cut, part in clashes:
                cut.parts.remove(part)
                cut.runs_in_i = True
            self.asked -= back
            self.stops -= {edge for edge in self.branches if edge[0] in back}
            self.branches = {edge: part for edge, part in self.branches.items() if edge[0] not in back}
            self.walk([part.edge[0] for _, part in clashes] + list(back))

    def is_reached(self, node: Node) -> bool:
        """Whether I reaches a node where a branch begins, or what lies behind it, in another way."""
        below = [edge for edge in node.next_functions if edge[0] is not None]
        return node in self.spine or any(meets(edge, self.spine, self.asked) for edge in below)

    def triggers(self) -> list[Node]:
        """For each compiled graph with nothing but leaves below it, one of the leaves that nothing defers."""
        found = []
        for opaque in self.opaque:
            if len([1 for child, _ in opaque.node.next_functions if child is not None]) == len(opaque.positions):
                parts = [*self.branches.values(), *(part for cut in self.cuts for part in cut.parts)]
                late = {leaf for part in parts for leaf in part.leaves()}
                free = [leaf for leaf in opaque.leaves if leaf not in late]
                if not free:
                    self.walk([opaque.leaves[0]])
                    self.settle()
                found += free[:1]
        return found

    def walk(self, stack: list[Node]) -> None:
        """Extend the spine from ``stack`` downwards."""
        spine, stops, stop_nodes, kinds = self.spine, self.stops, self.stop_nodes, self.kinds
        leaf_kind = ACCUMULATE_GRAD
        while stack:
            node = stack.pop()
            if node in spine:
                continue
            kind = type(node)
            if kind is leaf_kind:
                spine[node] = ()
                self.ready.append(node)
                continue
            edges: Sequence[Edge] = node.next_functions
            known = kinds.get(kind, _UNKNOWN)
            if known is not None:
                edges = self.look_into(node, edges) if known is _UNKNOWN else self.cut(node, edges, known)
            spine[node] = edges
            is_end = True
            for edge in edges:
                child = edge[0]
                if child is None:
                    continue
                if child in stop_nodes and (edge in stops or self.joins_branch(edge)):
                    self.reached.add(edge)
                    is_end = False
                elif type(child) is not leaf_kind:
                    stack.append(child)
                    is_end = False
                elif child not in spine:
                    spine[child] = ()
                    self.ready.append(child)
            if is_end:
                self.has_ends = True

    def look_into(self, node: Node, edges: Sequence[Edge]) -> Sequence[Edge]:
        """The edges that I follows, of a node whose kind is new to the walk, or each of which is looked at anew."""
        kind = type(node)
        known = self.look_up(kind, node)
        if known is not None:
            return self.cut(node, edges, known)
        if kind in self.opaque_kinds:
            return self.past_leaves(node, edges)
        return self.cut_function(node, edges) if kind in self.function_kinds else edges

    def look_up(self, kind: type, node: Node) -> _Kind | None:
        """The rules for a kind of node, if any; raises SplitError for one that cannot be split."""
        name = kind.__name__
        operands = RULES.get(name)
        known = None if operands is None else _Kind(operands, *unpack_hooks(kind))
        if name in _OPAQUE:
            self.opaque_kinds.add(kind)
        if name in UNSUPPORTED:
            UNSUPPORTED[name](node)
        elif not issubclass(kind, BackwardCFunction):
            self.kinds[kind] = known
        else:
            self.function_kinds.add(kind)
            if len(gradient_slots(node)) != 1:
                return None  # a rule is for nodes with one output; each of a custom Function's may have another number
        return known

    def past_leaves(self, node: Node, edges: Sequence[Edge]) -> Sequence[Edge]:
        """The edges of an opaque node that I follows: not those to leaves that are no inputs, which it sees to."""
        if type(node).__name__ == COMPILED_NODE and UNSEEN.on_node(node):
            return edges  # hooks on it expect the gradients, and would get marks; a captured module returns none anyway
        inputs = self.inputs
        positions = [i for i, edge in enumerate(edges) if type(edge[0]) is ACCUMULATE_GRAD and edge not in inputs]
        if positions:
            self.opaque.append(OpaqueNode(node, positions))
        return [edge for edge in edges if type(edge[0]) is not ACCUMULATE_GRAD or edge in inputs]

    def cut(self, node: Node, edges: Sequence[Edge], kind: _Kind) -> Sequence[Edge]:
        """Make the node a cut, if some of its operands can be deferred; the edges that I follows."""
        operands, read, unpacked = kind
        holders: Sequence[Any] = ()
        packed: Packing = None
        try:
            is_packed = read(node) != unpacked
        except (AttributeError, RuntimeError):
            is_packed = True  # or it cannot be told in this way
        if is_packed:
            packed = packing_of(found := packed_by_hooks(node))
            holders = found if packed == "checkpoint" else ()
        low, high = self.unhooked
        if packed is not None or not low < sequence_number(node) <= high:
            self.is_quiet = False
            if packed == "foreign" or UNSEEN.on_node(node):  # hooks on it expect the gradients of all operands
                return edges
        deferrable = self.deferrable
        parts = (
            deferrable.chains_of(operands.weights, edges)
            or deferrable.chains_of(operands.lefts, edges)
            or deferrable.first_from_parameters(operands.weights + operands.lefts, edges)
        )
        if not parts:
            return edges
        if operands.biases:
            parts += deferrable.chains_of(operands.biases, edges)
        followed = list(edges)
        for part in parts:
            followed[part.position] = _NOWHERE
        for child, _ in followed:
            if child is not None:
                self.cuts.append(Cut(node, parts, packed, True, holders))
                return followed
        if packed == "checkpoint":
            if not can_share_recomputation():
                return edges  # what a checkpoint recomputes can be read only when the node runs
            deferrable.recomputes = True
        refuse_spent(node)
        self.cuts.append(Cut(node, parts, packed, False, holders))
        return followed

    def cut_function(self, node: Node, edges: Sequence[Edge]) -> Sequence[Edge]:
        """Make a custom Function's node a cut, if its backward is called in two parts; the edges that I follows."""
        record = record_of(function_of(node))
        if not record.is_wanted(node.needs_input_grad):
            return edges
        record.was_met, packed = True, packing(node)
        if packed == "foreign" or UNSEEN.on_node(node):
            return edges
        parts = self.deferrable.weights_of_function(edges)
        deferred = [part.position for part in parts]
        followed = [edge for place, edge in enumerate(edges) if edge[0] is not None and place not in deferred]
        cut = function_cut(record, node, parts, packed, self.exact) if followed else None
        if cut is None or cut.is_trial:
            self.trials += [cut] if cut is not None else []
            return edges
        self.cuts.append(cut)
        return followed
