"""W: the weight gradients, when their turn comes.

What waits is a list of parts: a gradient caught in I, the rule's ``Later``, and the edge its result goes to. Parts that
end in the same parameter are run together, so that it gets its whole gradient at once and its hooks run once.

A parameter that nobody watches takes its parts straight into ``.grad``. Otherwise, or where something lies between the
part and the parameter (a slice, ``W + A @ B``), the engine takes the parts from their edges on, as in a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway.errors import PendingError
from sternway.split._later import Later, Product, storage_bytes
from sternway.split._plan import Cut
from sternway.split._saved import read_again
from sternway.split._target import Edge, Node, leaves_behind


class Catch:
    """What I caught at one cut."""

    __slots__ = ("cut", "grads", "laters")

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.grads: list[tuple[Tensor | None, ...]] = []  # of the node's output, once it has arrived
        self.laters: list[Later] = []  # by wait, once read

    def read(self) -> None:
        """Read off the node what W needs."""
        node = self.cut.node
        self.laters = [wait.operand.function(node) for wait in self.cut.waits]

    def read_and_keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """The same for a node under a checkpoint, where it must happen as the node is about to run."""
        read_again(self.cut.node, times=len(self.cut.waits))
        self.read()
        self.grads.append(grads)


class Part:
    """One contribution to a parameter: ``later`` of ``grad``, or ``grad`` itself."""

    __slots__ = ("edge", "grad", "later", "transposed", "version")

    def __init__(self, grad: Tensor, later: Later | None, edge: Edge, transposed: bool) -> None:
        self.grad, self.later = grad, later
        self.edge = edge  # where the contribution goes
        self.transposed = transposed  # the parameter is the transpose of what the contribution is to
        self.version = grad._version

    def check(self) -> None:
        """Raise if what W needs was changed since I, as autograd does for what it saves."""
        if self.grad._version != self.version or (self.later is not None and self.later.was_changed()):
            raise PendingError(
                "what I leaves for W stays as it is",
                got=f"a tensor of shape {tuple(self.grad.shape)}, or what it is multiplied with, changed in place",
                fix="change a copy, or run W first",
            )

    def value(self, transposed: bool = False) -> Tensor:
        return self.grad if self.later is None else self.later.gradient(self.grad, transposed)

    def is_computed(self) -> bool:
        """Whether W has nothing to compute here."""
        return self.later is None or self.later.is_computed

    def compute_if_from(self, storages: set[int]) -> None:
        """Compute the value now, if it is made from one of these storages."""
        if self.later is not None and any(kept.data_ptr() in storages for kept in self.later.kept):
            self.check()
            self.grad, self.later = _reduced(self), None
            self.version = self.grad._version

    def storages(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self.tensors() if tensor.layout == torch.strided}

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.grad, *(self.later.kept if self.later is not None else ()))


@dataclass(slots=True)
class _Group:
    """Parts that the engine takes on together: they share parameters, or hooks, or a graph on the way to them."""

    leaves: dict[Node, None]
    parts: list[Part]


class Pending:
    """The weight gradients of one backward, not yet computed.

    Dropping it frees what it holds; the parameters then never get these gradients.
    """

    def __init__(
        self,
        catches: Iterable[Catch],
        ready: Iterable[tuple[Node, Tensor]],
        compiled: Iterable[tuple[Node, Tensor | Later]] = (),
    ) -> None:
        self._state = "waiting"
        self._direct: dict[Node, list[Part]] = {}
        self._groups: deque[_Group] = deque()
        late: dict[Node, None] = {}
        for catch in catches:
            if not catch.grads or (grad := catch.grads[0][0]) is None:
                continue  # no gradient reached the cut
            for wait, later in zip(catch.cut.waits, catch.laters, strict=True):
                if wait.target is None:
                    self._group(Part(grad, later, wait.edge, False), late)
                else:
                    leaf, transposed = wait.target
                    self._direct.setdefault(leaf, []).append(Part(grad, later, wait.edge, transposed))
                    late[leaf] = None
        early: dict[Node, None] = {}
        for leaf, found in (*ready, *compiled):
            known = isinstance(found, Tensor)
            part = Part(found if known else _NONE, None if known else found, (leaf, 0), False)
            self._direct.setdefault(leaf, []).append(part)
            (early if part.is_computed() else late)[leaf] = None
        for group in self._groups:
            for leaf in group.leaves:
                group.parts += self._direct.pop(leaf, ())
        self.deferred: tuple[Tensor, ...] = tuple([leaf.variable for leaf in late])
        """Parameters whose gradient is computed in ``run()``, at least in part."""
        self.ready: tuple[Tensor, ...] = tuple([leaf.variable for leaf in early if leaf not in late])
        """Parameters whose gradient is computed already and only waits to be accumulated."""

    def _group(self, part: Part, late: dict[Node, None]) -> None:
        """Put ``part`` with whatever shares a parameter with it."""
        merged = _Group(dict.fromkeys(leaves_behind(part.edge)), [part])
        late |= merged.leaves
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
        parts = [*chain(*self._direct.values()), *chain(*(group.parts for group in self._groups))]
        tensors = {id(tensor): tensor for part in parts for tensor in part.tensors()}
        return storage_bytes(list(tensors.values()), [*self.deferred, *self.ready])

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
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            while direct:
                leaf, parts = direct.popitem()
                parameter = leaf.variable
                if not parameter.requires_grad:
                    continue
                if not anomaly and _unwatched(parameter):
                    _accumulate(parameter, parts, sums)
                    written.append(parameter)
                elif parameter._backward_hooks:  # a hook may stand for several parameters: all in one backward
                    hooked.leaves[leaf] = None
                    hooked.parts += parts
                else:
                    groups.append(_Group({leaf: None}, parts))
            if sums:
                totals, values = zip(*sums.values(), strict=True)
                torch._foreach_add_(totals, values)
            if hooked.parts:
                groups.append(hooked)
            self._compute_what_hooks_might_change()
            while groups:
                _hand_to_engine(groups.popleft(), anomaly)
        _notify(written)
        self._state = "has run"

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


_NONE = torch.empty(0)  # stands for the gradient, where what waits needs none
_ORDINARY = (Tensor, torch.nn.Parameter)


def _unwatched(parameter: Tensor) -> bool:
    """Whether ``.grad`` can be written without the engine: no Python hooks, and tensors of the ordinary kind."""
    if type(parameter) not in _ORDINARY or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    grad, dtype = parameter.grad, parameter.dtype
    if grad is None:
        return parameter.layout == torch.strided and getattr(parameter, "grad_dtype", dtype) == dtype
    return type(grad) is Tensor and grad.layout == torch.strided and grad.dtype == dtype and not grad.requires_grad


def _accumulate(parameter: Tensor, parts: list[Part], sums: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Add the parts to ``parameter.grad``; a plain sum is left in ``sums``, to be done with others in one call."""
    while parts:
        part = parts.pop()
        part.check()
        later, total = part.later, parameter.grad
        transposed = part.transposed and parameter.ndim > 1  # .t() of a vector is the vector
        if total is not None and isinstance(later, Product) and later.add_to(total, part.grad, transposed):
            continue
        value = part.value(transposed)
        if value.shape != parameter.shape:
            value = value.sum_to_size(parameter.shape)
        if total is None:
            parameter.grad = _own(value, parameter, part)
        elif total.layout != torch.strided:  # a sparse gradient before
            parameter.grad = value + total
        elif value.layout == torch.strided and value.dtype == total.dtype and id(total) not in sums:
            sums[id(total)] = (total, value)
        else:  # one call must not write twice to one place
            total.add_(value)


def _own(value: Tensor, parameter: Tensor, part: Part) -> Tensor:
    """``value`` as a first ``.grad``: of the parameter's type and layout, and sharing memory with nothing."""
    if value.layout != torch.strided:
        return value.clone() if part.later is None else value
    shared = () if part.later is not None and part.later.own else part.storages()
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if (
        value.dtype == parameter.dtype
        and (value.stride() == parameter.stride() if dense else value.is_contiguous())
        and (not shared or value.untyped_storage().data_ptr() not in shared)
    ):
        return value
    like = torch.empty_like(parameter) if dense else torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return like.copy_(value)


def _hand_to_engine(group: _Group, anomaly: bool) -> None:
    """Let the engine run from the parts' edges on: whatever lies between, the hooks, the accumulation."""
    edges, values = [], []
    while group.parts:
        part = group.parts.pop(0)
        part.check()
        edges.append(GradientEdge(*part.edge))
        values.append(_reduced(part))
    if anomaly and any(value.isnan().any() for value in values):
        shapes = ", ".join(str(tuple(leaf.variable.shape)) for leaf in group.leaves)
        raise PendingError(
            "under detect_anomaly no gradient may be nan",
            got=f"nan in W, for the parameter of shape {shapes}",
            fix="look for the operation in the forward whose output feeds this parameter's matrix product",
        )
    torch.autograd.backward(edges, values)


def _reduced(part: Part) -> Tensor:
    """The part's value, summed over whatever dimensions its operand was broadcast in."""
    node, index = part.edge
    value, shape = part.value(), tuple(node._input_metadata[index].shape)
    return value if tuple(value.shape) == shape else value.sum_to_size(shape)


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
