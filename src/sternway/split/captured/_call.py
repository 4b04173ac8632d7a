"""A captured module in an autograd graph: one node, whose forward replays F and whose backward replays I.

W is left to the split, as a compiled graph leaves it (``compiled/_offer.py``); in an ordinary backward it is replayed
at once. The node has an edge to each trained parameter, so that everyone sees whose gradients it makes. No gradient
travels along them, unless the parameter has hooks: W adds to ``.grad`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sternway._torch.autograd import arrival_at
from sternway.errors import SplitError
from sternway.saved import Policy
from sternway.split._accumulate import Accumulator
from sternway.split._part import Node, Part
from sternway.split._unsupported import a_second_time
from sternway.split.captured._grads import GradBuffers
from sternway.split.captured._graphs import GraphSet
from sternway.split.compiled._offer import take_offer


class Lease:
    """One microbatch's use of a set, from F to W. The set is free when nobody holds the lease."""

    __slots__ = ("__weakref__", "_grads", "graphs")

    def __init__(self, graphs: GraphSet, grads: GradBuffers) -> None:
        self.graphs, self._grads = graphs, grads

    def replay_weights(
        self, leaves: Sequence[Node], skipped: Sequence[Tensor], accumulator: Accumulator
    ) -> list[tuple[Node, Tensor]]:
        """Replay W for these leaves; the ``.grad`` of ``skipped`` parameters stays as it is.

        Returns:
            The leaves whose ``.grad`` the engine must write, because of hooks or other reasons, with their gradients.
        """
        direct, left = [], []
        for leaf in leaves:
            parameter = accumulator.writable(leaf)
            if parameter is None:
                left.append(leaf)
            else:
                direct.append(parameter)
        others = [leaf.variable for leaf in left]
        with torch.no_grad(), self._grads.adding(direct, [*others, *skipped], accumulator.exact) as added:
            self.graphs.backward_weight()
        return list(zip(left, added, strict=False))


class CapturedWork:
    """A captured W that has yet to run. What it needs is in the memory of its set, which is there all the time."""

    early: Sequence[Node] = ()

    def __init__(self, lease: Lease, late: Sequence[Node]) -> None:
        self._lease: Lease | None = lease
        self.late = late

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def pack(self, policy: Policy) -> None:
        """What a captured graph holds stays as it is."""

    def check(self) -> None:
        """Nobody else has the tensors that are needed."""

    def keep_apart(self, written: Set[int]) -> None:
        """They are in memory of its own."""

    def run(self, accumulator: Accumulator) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None, "a Pending runs once"
        for leaf, value in lease.replay_weights(self.late, (), accumulator):
            accumulator.queue(leaf, [Part.of_leaf(leaf, value)])


class CapturedCall(torch.autograd.Function):
    """Its tensors are the inputs that need a gradient, and the trained parameters."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, tensors: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        outputs = lease.graphs.forward(tensors)
        ctx.lease = lease
        ctx.set_materialize_grads(False)
        needing = set(lease.graphs.needing)
        ctx.mark_non_differentiable(*[output for index, output in enumerate(outputs) if index not in needing])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        lease, ctx.lease = ctx.lease, None  # a graph that is kept must not keep the set
        if lease is None:
            raise a_second_time()
        leaves = [leaf for leaf, _ in ctx.next_functions]
        try:
            return None, None, *_replay(lease, leaves, grads)
        except BaseException:
            lease.graphs.lease = None  # whoever keeps the error keeps the lease with it
            raise


def _replay(lease: Lease, leaves: list[Node], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replay I, and W too unless the split takes it; the gradients of the call's tensors."""
    graphs, offer = lease.graphs, take_offer()
    found = graphs.backward_input([grads[index] for index in graphs.needing])
    found += [None] * (len(leaves) - len(found))
    places = range(len(graphs.wanted), len(leaves))
    waiting = [index for index in offer.positions if index in places] if offer is not None else []
    arrivals = {index: arrival_at(leaves[index]) for index in set(places).difference(waiting)}
    if "asked" in arrivals.values():
        raise SplitError(
            "the gradients of a captured module's parameters are added to .grad, and cannot be returned",
            got="a parameter of it among the inputs of autograd.grad or backward_input",
            fix="read .grad after backward(); or call the module that was captured",
        )
    if offer is not None:
        offer.accept(CapturedWork(lease, [leaves[index] for index in waiting]), {})
    elif runs := sorted(index for index, arrival in arrivals.items() if arrival == "runs"):
        skipped = [leaves[index].variable for index in places if index not in runs]
        own = [leaves[index] for index in runs]
        values = {id(leaf): value for leaf, value in lease.replay_weights(own, skipped, Accumulator(own))}
        for index in runs:
            found[index] = values.get(id(leaves[index]))
    return found
