"""W: the weight gradients, when their turn comes.

What waits is a list of parts: a gradient caught in I, the rule's ``Later``, and the edge its result goes to. Parts that
end in the same parameter are run together, so that it gets its whole gradient at once and its hooks run once.

A parameter that nobody watches takes its parts straight into ``.grad``: that is ``_accumulate``. Otherwise, or where
something lies between the part and the parameter (a slice, ``W + A @ B``), the engine takes the parts from their edges
on, as in a backward. What a compiled graph left is a block: one call computes the gradients of many parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway.errors import PendingError
from sternway.saved import Policy
from sternway.split._accumulate import Work, accumulate, unwatched
from sternway.split._compiled._block import Block, Late
from sternway.split._later import storage_bytes
from sternway.split._part import Cut, Part
from sternway.split._target import Node


@dataclass(slots=True)
class _Group:
    """Parts that the engine takes on together: they share parameters, or hooks, or a graph on the way to them."""

    leaves: dict[Node, None]
    parts: list[Part]


class Pending:
    """The weight gradients of one backward, not yet computed.

    Dropping it frees what it holds; the parameters then never get these gradients.
    """

    def __init__(self, cuts: Iterable[Cut], ready: Sequence[tuple[Node, Tensor]], blocks: Sequence[Block] = ()) -> None:
        self._state = "waiting"
        self._blocks = list(blocks)
        self._direct: dict[Node, list[Part]] = {}
        self._groups: deque[_Group] = deque()
        self._late: dict[Node, None] = {}
        self._early = [leaf for leaf, _ in ready]
        direct = self._direct
        for cut in cuts:
            if not cut.grads or (grad := cut.grads.pop()[0]) is None:
                continue  # no gradient reached the cut
            version = grad._version
            for part in cut.parts:
                part.grad, part.version = grad, version
                leaf = part.leaf
                if leaf is None:
                    self._group(part)
                elif leaf in direct:
                    direct[leaf].append(part)
                else:
                    direct[leaf] = [part]
        late = self._late
        late |= dict.fromkeys(direct)
        for leaf, grad in ready:
            direct.setdefault(leaf, []).append(Part.of_leaf(leaf, grad))
        for group in self._groups:
            for leaf in group.leaves:
                group.parts += direct.pop(leaf, ())
        for block in blocks:
            late |= dict.fromkeys(block.late)
            self._early += block.early

    @property
    def deferred(self) -> tuple[Tensor, ...]:
        """Parameters whose gradient is computed in ``run()``, at least in part."""
        return tuple([leaf.variable for leaf in self._late])

    @property
    def ready(self) -> tuple[Tensor, ...]:
        """Parameters whose gradient is computed already and only waits to be accumulated."""
        return tuple([leaf.variable for leaf in dict.fromkeys(self._early) if leaf not in self._late])

    def _group(self, part: Part) -> None:
        """Put ``part`` with whatever shares a parameter with it."""
        merged = _Group(dict.fromkeys(part.leaves()), [part])
        self._late |= merged.leaves
        apart: deque[_Group] = deque()
        for group in self._groups:
            if merged.leaves.keys().isdisjoint(group.leaves):
                apart.append(group)
            else:
                merged = _Group(group.leaves | merged.leaves, group.parts + merged.parts)
        self._groups = deque([*apart, merged])

    @property
    def nbytes(self) -> int:
        """Bytes held until ``run()``, each storage once, the parameters' own not counted."""
        tensors = [tensor for part in self._parts() for tensor in part.tensors()]
        tensors += [tensor for block in self._blocks for tensor in block.waiting.kept]
        return storage_bytes(tensors, [*self.deferred, *self.ready])

    def _parts(self) -> list[Part]:
        return [*chain(*self._direct.values()), *chain(*(group.parts for group in self._groups))]

    def pack(self, policy: Policy) -> None:
        """Let a policy of ``sternway.saved`` have what waits, until ``run()``: moved away, or in fewer bytes.

        What compiled graphs wait with stays as it is.

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
        for part in self._parts():
            part.pack(policy)

    def run(self) -> None:
        """Compute the gradients that wait, add them to ``.grad``, and run the parameters' hooks.

        Raises:
            PendingError: on a second call.
        """
        if self._state != "waiting":
            raise PendingError(
                "a Pending runs once, since what it holds is freed as it goes",
                got=f"run() on one that {self._state}",
                fix="call backward_input again on a new forward",
            )
        self._state = "failed half-way"
        anomaly = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        direct, groups, hooked = self._direct, self._groups, _Group({}, [])
        written: list[Tensor] = []
        with torch.no_grad():
            work = Work()
            while self._blocks:
                written += self._run_block(self._blocks.pop(), anomaly)
            while direct:
                leaf, parts = direct.popitem()
                parameter = leaf.variable
                if not parameter.requires_grad:
                    continue
                if not anomaly and unwatched(parameter):
                    work.add(parameter, parts)
                    written.append(parameter)
                elif parameter._backward_hooks:  # a hook may stand for several parameters: all in one backward
                    hooked.leaves[leaf] = None
                    hooked.parts += parts
                else:
                    groups.append(_Group({leaf: None}, parts))
            work.do()
            if hooked.parts:
                groups.append(hooked)
            self._compute_what_hooks_might_change()
            while groups:
                _hand_to_engine(groups.popleft(), anomaly)
        _notify(list({id(parameter): parameter for parameter in written}.values()))
        self._state = "has run"

    def _run_block(self, block: Block, anomaly: bool) -> list[Tensor]:
        """Compute a block for the parameters that nobody watches, which are returned; the others take it in parts."""
        waiting = block.waiting
        waiting.check()
        parameters, indices = [], []
        for leaf, index in (*block.early.items(), *block.late.items()):
            parameter = leaf.variable
            group = next((group for group in self._groups if leaf in group.leaves), None) if self._groups else None
            if group is None and not anomaly and unwatched(parameter):
                if parameter.requires_grad:
                    parameters.append(parameter)
                    indices.append(index)
            else:
                part = Part.of_leaf(leaf, _NONE, Late(waiting, index))
                (self._direct.setdefault(leaf, []) if group is None else group.parts).append(part)
        with torch._C._DisableAutocast():  # as the graph was compiled
            accumulate(parameters, waiting.take(indices))
        return parameters

    def _compute_what_hooks_might_change(self) -> None:
        """What is made from a parameter, before any hook runs: an optimizer in the backward changes parameters."""
        if self._groups:
            owned = {p.data_ptr() for p in (*self.deferred, *self.ready) if p.layout == torch.strided}
            for part in chain(*(group.parts for group in self._groups)):
                part.compute_if_from(owned)

    def __repr__(self) -> str:
        return (
            f"Pending({self._state}: {len(self.deferred)} parameters deferred, {len(self.ready)} ready, "
            f"{self.nbytes} bytes held)"
        )


_NONE = torch.empty(0)  # stands for the gradient of an output, where what waits needs none


def _hand_to_engine(group: _Group, anomaly: bool) -> None:
    """Let the engine run from the parts' edges on: whatever lies between, the hooks, the accumulation."""
    edges, values = [], []
    while group.parts:
        part = group.parts.pop(0)
        part.ready()
        edges.append(GradientEdge(*part.edge))
        values.append(part.reduced())
    if anomaly and any(value.isnan().any() for value in values):
        shapes = ", ".join(str(tuple(leaf.variable.shape)) for leaf in group.leaves)
        raise PendingError(
            "under detect_anomaly no gradient may be nan",
            got=f"nan in W, for the parameter of shape {shapes}",
            fix="look for the operation in the forward whose output feeds this parameter's matrix product",
        )
    torch.autograd.backward(edges, values)


class _Notify(torch.autograd.Function):
    """A node whose backward sends each parameter's AccumulateGrad an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.count


def _notify(parameters: list[Tensor]) -> None:
    """Run the hooks that sit on AccumulateGrad nodes, which Python cannot see.

    DDP's reducer is one: it reduces a bucket when the AccumulateGrad of each parameter in it has run. An undefined
    gradient runs the node and its hooks and adds nothing to ``.grad``.
    """
    if parameters and torch.distributed.is_available() and torch.distributed.is_initialized():
        with torch.enable_grad():
            _Notify.apply(*parameters).backward()  # type: ignore[no-untyped-call]  # Function.apply is untyped
