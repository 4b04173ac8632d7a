"""How the split and a compiled backward meet: an offer, made just before the node runs and taken while it runs.

The engine calls a compiled backward as any other, and on whichever thread it likes. So a hook that runs just before
the node, on that thread, leaves an offer there; a compiled backward that finds one runs I alone, leaves its W in the
offer, and returns a *mark* in the place of each gradient that waits. A hook that runs just after the node knows by the
marks which of the node's edges wait, and stops them there. Other compiled backwards find no use for the offer, and
their gradients are taken as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sternway.split._compiled._block import Block, Waiting
from sternway.split._target import Node


class Offer:
    """One compiled node of a backward that is being split: what arrived for each of the leaves behind it."""

    __slots__ = ("_early", "_marks", "block", "node", "open", "positions", "ready")

    def __init__(self, node: Node, positions: list[int]) -> None:
        self.node = node
        self.positions = positions  # the edges whose gradients may wait, each to a leaf
        self.open = True
        self.block: Block | None = None
        self.ready: list[tuple[Node, Tensor]] = []  # gradients that are there already, by leaf
        self._marks: dict[int, int] = {}
        self._early = 0

    def before(self, grads: Any) -> None:
        """Just before the node runs."""
        _here.offer = self

    def accept(self, waiting: Waiting, marks: dict[int, int], early: int) -> None:
        """Called by the compiled backward.

        Args:
            waiting: what W will compute.
            marks: for the id of each mark that it returns, the place of what it stands for.
            early: how many of them I has computed; they come first.
        """
        self.block, self._marks, self._early = Block(waiting), marks, early

    def after(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """Just after it ran: keep what goes to the leaves, and let the engine see nothing of it."""
        _here.offer = None
        edges, marks, block = self.node.next_functions, self._marks, self.block
        left = list(grad_inputs)
        for position in self.positions:
            grad = left[position]
            if grad is None:
                continue
            leaf, place = edges[position][0], marks.get(id(grad))
            left[position] = None
            if place is None or block is None:
                self.ready.append((leaf, grad))
            elif leaf in block.early or leaf in block.late:  # one parameter, given twice
                self.ready.append((leaf, block.waiting.take_one(place)))
            else:
                (block.early if place < self._early else block.late)[leaf] = place
        for position, grad in enumerate(left):
            if grad is not None and block is not None and id(grad) in marks:  # the split was asked for this one
                left[position] = block.waiting.take_one(marks[id(grad)])
        return tuple(left)


class _Here(threading.local):
    offer: Offer | None = None


_here = _Here()


def take_offer() -> Offer | None:
    """The offer that was made for the node which is running on this thread, if any; it is made once."""
    offer = _here.offer
    if offer is None:
        return None
    _here.offer = None
    return offer if offer.open else None


@contextmanager
def making(offers: list[Offer]) -> Iterator[None]:
    """While the engine runs, let compiled graphs leave their weight gradients to W."""
    handles = []
    try:
        for offer in offers:
            handles += [offer.node.register_prehook(offer.before), offer.node.register_hook(offer.after)]
        yield
    finally:
        for offer in offers:
            offer.open = False  # a thread may still have it, if the node failed
        for handle in handles:
            handle.remove()
