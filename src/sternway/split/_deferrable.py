"""Which operands of a node can wait: those that only parameters lie behind, so that W can follow what is there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from sternway._torch.nodes import ACCUMULATE_GRAD
from sternway._torch.saved_hooks import can_share_recomputation
from sternway.split._behind import Behind, direct_target
from sternway.split._part import Edge, Part
from sternway.split._rules import Operand
from sternway.split._unseen import UNSEEN


class Deferrable:
    """Finds, for one graph, the operands that can wait.

    Args:
        inputs: where gradient stops.
    """

    def __init__(self, inputs: set[Edge]) -> None:
        self._inputs = inputs
        self._input_nodes = {node for node, _ in inputs}
        self._unhooked = UNSEEN.unhooked()
        self.recomputes = False  # whether W goes through what a checkpoint recomputes in I

    @cached_property
    def _behind(self) -> Behind:
        """What lies behind edges; most graphs never ask."""
        return Behind(self._inputs)

    def chains_of(self, operands: tuple[Operand, ...], edges: Sequence[Edge]) -> list[Part]:
        """The operands that are plain chains from parameters."""
        parts = []
        for operand in operands:
            position = operand.position
            if position < len(edges) and (child := (edge := edges[position])[0]) is not None:
                if type(child) is ACCUMULATE_GRAD and child not in self._input_nodes:
                    leaf, transposed = child, False  # as direct_target, which a bias need not ask
                else:
                    leaf, transposed = direct_target(edge, self._input_nodes, self._unhooked)
                if leaf is not None or (self._behind.is_chain(edge) and self.can_pass(edge)):
                    parts.append(Part(edge, leaf, transposed, position, operand.function))
        return parts

    def first_from_parameters(self, operands: tuple[Operand, ...], edges: Sequence[Edge]) -> list[Part]:
        """The first operand that depends on no input, such as ``W + A @ B``; without inputs, on no data."""
        for operand in operands:
            edge = edges[operand.position] if operand.position < len(edges) else (None, 0)
            if edge[0] is None or (self._behind.leads_to_input(edge) if self._inputs else self._behind.has_data(edge)):
                continue
            if self.can_pass(edge):
                return [Part(edge, None, False, operand.position, operand.function)]
        return []

    def can_pass(self, edge: Edge) -> bool:
        """Whether W can go through what lies behind ``edge``."""
        if self._behind.is_recomputed(edge):
            if not can_share_recomputation():
                return False  # a checkpoint would recompute once more
            self.recomputes = True
        return True

    def weights_of_function(self, edges: Sequence[Edge]) -> list[Part]:
        """Which inputs of a custom Function are made of parameters; without inputs of the graph, are parameters."""
        parts = []
        for place, edge in enumerate(edges):
            if edge[0] is not None:
                leaf, transposed = direct_target(edge, self._input_nodes, self._unhooked)
                is_chain = self._inputs and self._behind.is_chain(edge) and not self._behind.is_recomputed(edge)
                if leaf is not None or is_chain:
                    parts.append(Part(edge, leaf, transposed, place))
        return parts
