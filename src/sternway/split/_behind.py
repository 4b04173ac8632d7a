"""What lies behind an edge: questions that the planner asks of a graph, each node visited once for each.

a chain      only parameters, with no node on the way that has a rule: views, casts, arithmetic
an input     where gradient stops; what leads to none is W's work
data         a product or a lookup one side of which needs no gradient: what it makes is an activation
a checkpoint saved tensors that must be recomputed before they can be read
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from torch import Tensor
from torch.nn import Parameter

from sternway._storage import tensors_in
from sternway._torch.autograd import gradient_slots, sequence_number
from sternway._torch.nodes import ACCUMULATE_GRAD, TO_COPY, TRANSPOSE, T, held_by
from sternway._torch.tensors import base_of
from sternway.saved import Packed
from sternway.split._part import Edge, Node, Part, is_transpose, packing
from sternway.split._rules import RULES


class Search:
    """Whether some node behind another is what is looked for, itself included: depth first, without recursion.

    Args:
        is_here: whether a node is it, given its edges too.
    """

    def __init__(self, is_here: Callable[[Node, Sequence[Edge]], bool]) -> None:
        self._is_here = is_here
        self._known: dict[Node, bool] = {}

    def behind(self, start: Node) -> bool:
        known, stack = self._known, [start]
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
                continue
            edges = node.next_functions
            below = [child for child, _ in edges if child is not None]
            if self._is_here(node, edges) or any(known.get(child) for child in below):
                known[node] = True
            elif unknown := [child for child in below if child not in known]:
                stack += unknown
            else:
                known[node] = False
        return known[start]


class Behind:
    """What lies behind the edges of one graph."""

    def __init__(self, inputs: set[Edge]) -> None:
        self._inputs = inputs
        self._to_input = Search(lambda node, edges: not inputs.isdisjoint(edges))
        self._to_rule = Search(lambda node, edges: type(node).__name__ in RULES or not inputs.isdisjoint(edges))
        self._to_data = Search(takes_data)
        self._to_checkpoint = Search(lambda node, edges: packing(node) == "checkpoint")

    def is_chain(self, edge: Edge) -> bool:
        """Whether only parameters lie behind ``edge``, with no node on the way that has a rule."""
        return edge not in self._inputs and not self._to_rule.behind(edge[0])

    def leads_to_input(self, edge: Edge) -> bool:
        """Whether an input lies behind ``edge``."""
        return edge in self._inputs or self._to_input.behind(edge[0])

    def has_data(self, edge: Edge) -> bool:
        """Whether what arrives at ``edge`` is an activation of a graph without inputs, not a weight."""
        return self._to_data.behind(edge[0])

    def is_recomputed(self, edge: Edge) -> bool:
        """Whether a checkpoint recomputes what nodes behind ``edge`` saved."""
        return self._to_checkpoint.behind(edge[0])


def takes_data(node: Node, edges: Sequence[Edge]) -> bool:
    """Whether a node is a product or a lookup with data, in a graph without inputs; these are its edges."""
    operands = RULES.get(type(node).__name__)
    if operands is None:
        return False
    biases = [operand.position for operand in operands.biases]
    if len(edges) > 1 and all(child is not None or at in biases for at, (child, _) in enumerate(edges)):
        return False
    return any(not _is_parameter(tensor) for tensor in _tensors_of(node))  # it saved the other side, maybe a frozen one


def direct_target(edge: Edge, stop_at: set[Node], unhooked: tuple[int, int]) -> tuple[Node | None, bool]:
    """The leaf that ``edge`` leads to through transposes and casts alone, not passing ``stop_at`` or hooks.

    ``unhooked`` is what ``UNSEEN`` gives. Beside the leaf, whether its parameter (unless a vector) is the transpose of
    the operand at the edge.
    """
    node, transposed, cast = edge[0], False, False
    low, high = unhooked
    while node not in stop_at:
        kind = type(node)
        if kind is ACCUMULATE_GRAD:
            return node, transposed
        if not low < sequence_number(node) <= high:
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


def meets(edge: Edge, *places: Container[Node]) -> bool:
    """Whether some node behind ``edge`` is in one of ``places``."""
    return any(node in place for node in nodes_behind([edge]) for place in places)


def nodes_behind(edges: Sequence[Edge]) -> Iterator[Node]:
    """Every node behind ``edges``, their own included."""
    stack = [node for node, _ in edges if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        stack += new


def held_behind(parts: Sequence[Part]) -> Iterator[Tensor]:
    """The tensors that the graph behind some parts holds, until W has gone through it; no parameters."""
    for node in nodes_behind([part.edge for part in parts if part.leaf is None]):
        yield from (tensor for tensor in _tensors_of(node) if not _is_parameter(tensor))


def _tensors_of(node: Node) -> Iterator[Tensor]:
    for held in held_by(node):
        yield from held.tensors() if isinstance(held, Packed) else tensors_in(held)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, Parameter) or isinstance(base_of(tensor), Parameter)
