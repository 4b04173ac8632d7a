"""W: the weight gradients, when their turn comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway._bytes import show_bytes
from sternway._storage import storage_bytes, storage_sizes
from sternway._torch.saved_hooks import sharing
from sternway._torch.tensors import grad_of, storage_id
from sternway.errors import PendingError, SplitError
from sternway.saved import Policy
from sternway.split._accumulate import Accumulator
from sternway.split._deferred import Deferred
from sternway.split._part import Node
from sternway.split._turns import Turn, turn
from sternway.split.eager._hiding import Ran, hiding


class Pending:
    """The weight gradients of one backward, not yet computed.

    Dropping it frees what it holds; the parameters then never get these gradients.
    """

    def __init__(
        self,
        work: Iterable[Deferred],
        ran: Ran | None = None,
        undefined: Sequence[Node] = (),
        exact: bool = False,
        group: Any = None,
        graph: Sequence[GradientEdge] = (),
    ) -> None:
        self._work = list(work)  # run from the last to the first
        self._ran = ran or {}
        self._exact = exact
        self._group = group  # of what checkpoints have recomputed in I, if W reads some of it
        self._graph = graph  # kept where W begins at nodes that do not keep themselves
        self._accumulator: Accumulator | None = None  # while it runs
        self._state = "waiting"
        self._late: dict[Node, None] = {}
        self._early: dict[Node, None] = {}
        for each in self._work:
            self._late.update(dict.fromkeys(each.late))
            self._early.update(dict.fromkeys(each.early))
        # Leaves that no gradient arrived at, whose hooks run all the same.
        got = (self._late, self._early)
        self._undefined = [leaf for leaf in dict.fromkeys(undefined) if not any(leaf in some for some in got)]
        if self._ran and not self._late.keys().isdisjoint(self._ran):
            raise SplitError(
                "a hook cannot be put on a parameter during I if only part of its gradient is computed there",
                got=f"a new hook on a parameter of shape {[tuple(leaf.variable.shape) for leaf in self._ran]}",
                fix="register it before backward_input",
            )

    @property
    def deferred(self) -> tuple[Tensor, ...]:
        """Parameters whose gradient ``run()`` computes, at least in part."""
        return tuple([leaf.variable for leaf in self._late])

    @property
    def ready(self) -> tuple[Tensor, ...]:
        """Parameters whose gradient is computed; ``run()`` only accumulates it."""
        return tuple([leaf.variable for leaf in self._early if leaf not in self._late])

    @property
    def nbytes(self) -> int:
        """Bytes held until ``run()``: each storage counted once, the parameters not counted.

        What the autograd graph holds is counted where ``run()`` goes through a part of it.
        """
        tensors = [tensor for each in self._work for tensor in each.tensors()]
        if self._accumulator is not None:
            tensors += self._accumulator.tensors()
        return storage_bytes(tensors, [*self.deferred, *self.ready])

    def pack(self, policy: Policy) -> None:
        """Pack what is held, with a policy of ``sternway.saved``, until ``run()``: moved away, or in fewer bytes.

        What compiled graphs hold stays as it is.

        Example:
            >>> from sternway import saved, split
            >>> layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
            >>> grad, pending = split.backward_input(layer(x).sum(), None, x)
            >>> before = pending.nbytes
            >>> pending.pack(saved.compress("bf16"))
            >>> pending.nbytes < before
            True
            >>> pending.run()
        """
        for each in self._work:
            each.pack(policy)

    def run(self) -> None:
        """Compute the gradients, add them to ``.grad``, and run the parameters' hooks.

        Several threads may run a ``Pending`` each. Those that share parameters wait for each other.

        Raises:
            PendingError: on a second call, or if a tensor that is needed was changed in place since I.
        """
        self.compute()

    def compute(self, tell_nodes: bool = True) -> None:
        """``run()``; without ``tell_nodes``, hooks of C++ on AccumulateGrad nodes do not run, which a capture must not.

        Those are DDP's. Whoever replays W runs them.
        """
        leaves = {**self._late, **self._early}
        # A .grad of inference mode could not be added to later.
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with turn(leaves.keys()) as own, outside:
            self._compute(leaves, tell_nodes, own)

    def _compute(self, leaves: dict[Node, None], tell_nodes: bool, own: Turn) -> None:
        if self._state != "waiting":
            raise PendingError(
                "a Pending cannot run twice: what it held is freed",
                got=f"run() on one that {self._state}",
                fix="call backward_input on a new forward",
            )
        self._state = "failed half-way"
        written = _storages_of_grads(leaves)
        for each in self._work:
            each.check()
            if written:
                each.keep_apart(written)
        group = sharing(self._group) if self._group else nullcontext()
        with torch.no_grad(), hiding(self._ran) as mark, group:
            self._accumulator = accumulator = Accumulator(leaves, self._exact, tell_nodes, mark)
            while self._work:
                self._work.pop().run(accumulator)
            own.comes_to_hooks()
            accumulator.finish(self._undefined)
        self._accumulator, self._graph = None, ()
        self._state = "has run"

    def __repr__(self) -> str:
        return (
            f"Pending({self._state}: {len(self.deferred)} parameters deferred, {len(self.ready)} ready, "
            f"{show_bytes(self.nbytes)} held)"
        )


def _storages_of_grads(leaves: Iterable[Node]) -> frozenset[int]:
    """What W adds to, by the storages' numbers. A graph may read it, too: ``.grad`` is a tensor like others."""
    grads = [grad for leaf in leaves if (grad := grad_of(leaf.variable)) is not None]
    with suppress(NotImplementedError):  # sparse: it has several
        if all(type(grad) is Tensor for grad in grads):
            return frozenset(map(storage_id, grads))
    return frozenset(storage_sizes(grads))
