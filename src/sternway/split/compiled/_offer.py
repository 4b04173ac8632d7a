"""How the split and a compiled backward meet: an offer, made just before the node runs and taken while it runs.

The engine calls a compiled backward like any other, on a thread of its choice. So a hook that runs just before the
node, on that thread, leaves an offer there. A compiled backward that finds one runs I alone, leaves its W in the offer,
and returns a *mark* in the place of each weight gradient. A hook that runs just after the node knows by the marks
which of the node's edges are deferred, and stops them there. A DTensor's gradient arrives there as a DTensor, which
AOTAutograd has made of the mark; W makes the same of the gradient. Compiled backwards of other backends do not look for
an offer; their gradients are ready.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sternway._torch.dtensors import local_part
from sternway.errors import SplitError
from sternway.split._deferred import Deferred
from sternway.split._part import Node
from sternway.split._unseen import UNSEEN
from sternway.split.compiled._work import CompiledWork


class Offer:
    """One compiled or captured node of a backward that is being split.

    Args:
        node: the node.
        positions: those of its edges that lead straight to leaves, whose gradients may be deferred.
    """

    __slots__ = ("_numbers", "node", "open", "positions", "ready", "work")

    def __init__(self, node: Node, positions: list[int]) -> None:
        self.node = node
        self.positions = positions
        self.open = True
        self.work: Deferred | None = None
        self.ready: list[tuple[Node, Tensor]] = []  # leaves whose gradient is computed
        self._numbers: dict[int, int] = {}

    def before(self, grads: Any) -> None:
        """A hook that runs just before the node."""
        _here.offer = self

    def accept(self, work: Deferred, numbers: dict[int, int]) -> None:
        """Leave W here; called by the compiled or captured backward.

        Args:
            work: what W will compute.
            numbers: by the id of each mark that is returned, the number of the gradient that it stands for.
        """
        self.work, self._numbers = work, numbers

    def after(self, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> tuple[Tensor | None, ...]:
        """A hook that runs just after the node: keep what goes to the leaves, so that the engine does not."""
        _here.offer = None
        edges = self.node.next_functions
        work = self.work if isinstance(self.work, CompiledWork) else None  # others return no marks
        numbers = [None if grad is None else self._numbers.get(id(local_part(grad))) for grad in grad_inputs]
        if not set(self._numbers.values()) <= set(numbers):
            raise SplitError(
                "what a compiled backward returns must arrive at its node as it is, or as part of a DTensor",
                got=f"{len(set(numbers) - {None})} of {len(self._numbers)} marks, with torch {torch.__version__}",
                fix="use a release of torch that `sternway doctor` passes, or compile with another backend",
            )
        left = list(grad_inputs)
        for position in self.positions:
            grad, number, left[position] = left[position], numbers[position], None
            if grad is None:
                continue
            leaf = edges[position][0]
            if number is None or work is None:
                self.ready.append((leaf, grad))
            elif not work.claim(leaf, number, grad):  # the region got one parameter twice
                self.ready.append((leaf, work.take(number, grad)))
        for position, (grad, number) in enumerate(zip(left, numbers, strict=True)):
            if grad is not None and work is not None and number is not None:  # one that the split was asked for
                left[position] = work.take(number, grad)
        return tuple(left)


class _Here(threading.local):
    offer: Offer | None = None


_here = _Here()


def take_offer() -> Offer | None:
    """The offer that was made for the node which runs on this thread, if any; it can be taken once."""
    offer = _here.offer
    if offer is None:
        return None
    _here.offer = None
    return offer if offer.open else None


@contextmanager
def making(offers: list[Offer]) -> Iterator[None]:
    """Let compiled graphs that run in the block defer their weight gradients."""
    handles = []
    try:
        for offer in offers:
            handles += [offer.node.register_prehook(offer.before), offer.node.register_hook(offer.after)]
        UNSEEN.count_own(len(handles))
        yield
    finally:
        for offer in offers:
            offer.open = False  # a thread may still have it, if the node failed
        for handle in handles:
            handle.remove()
