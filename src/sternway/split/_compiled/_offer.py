"""How the split and a compiled backward meet: an offer, made just before the node runs and taken while it runs.

The engine calls a compiled backward as any other, and on whichever thread it likes. So a hook that runs just before
the node, on that thread, leaves an offer there; a compiled backward that finds one runs I alone, leaves its W in the
offer, and returns a *mark* in the place of each gradient that waits. A hook that runs just after the node knows by the
marks which of the node's edges wait, and stops them there. Other compiled backwards find no use for the offer, and
their gradients are taken as they are.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from sternway.split._later import Later
from sternway.split._target import Node


class Offer:
    """One compiled node of a backward that is being split: what arrived for each of the leaves behind it."""

    __slots__ = ("_laters", "node", "open", "parts", "positions")

    def __init__(self, node: Node, positions: tuple[int, ...]) -> None:
        self.node = node
        self.positions = positions  # the edges whose gradients may wait, each to a leaf
        self.open = True
        self.parts: list[tuple[Node, Tensor | Later]] = []  # by leaf: a gradient, or how to compute it in W
        self._laters: dict[int, Later] = {}

    def before(self, grads: Any) -> None:
        """Just before the node runs."""
        _here.offer = self

    def accept(self, laters: dict[int, Later]) -> None:
        """Called by the compiled backward: for the id of each mark that it returns, the gradient it stands for."""
        self._laters = laters

    def after(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Just after it ran: keep what goes to the leaves, and let the engine see nothing of it."""
        _here.offer = None
        edges = self.node.next_functions
        left = list(grad_inputs)
        for position in self.positions:
            grad = left[position]
            if grad is not None:
                self.parts.append((edges[position][0], self._laters.pop(id(grad), grad)))
                left[position] = None
        self._laters = {}
        return tuple(left)


class _Here(threading.local):
    offer: Offer | None = None


_here = _Here()


def take_offer() -> Offer | None:
    """The offer that was made for the node which is running on this thread, if any; it is made once."""
    offer, _here.offer = _here.offer, None
    return offer if offer is not None and offer.open else None
