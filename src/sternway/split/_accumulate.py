"""The accumulator: takes weight gradients in W, and adds them to ``.grad``.

A parameter without hooks gets its gradient straight into ``.grad``. Any other takes it from the autograd engine, as in
an ordinary backward: the engine runs whatever lies between a part and the parameter (a slice, ``W + A @ B``), the
hooks, and the accumulation. Parts that end in the same parameter go through one engine call, so that its hooks run
once, on the whole gradient.

On a GPU, gradients that are computed already are added by ``flush()``, many in one kernel. On a CPU each is added at
once: a bias's gradient and its weight's are made of one tensor, which is still in the processor's cache for the second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway._storage import storage_sizes
from sternway._torch.hooks import accumulate_hooks, fields_for_writing, tensor_hooks
from sternway._torch.parallel import in_process_group
from sternway._torch.tensors import ORDINARY, add_each, layout_enforced, needs_grad
from sternway.errors import PendingError
from sternway.split._behind import held_behind
from sternway.split._part import Node, Part, sum_to
from sternway.split._unseen import UNSEEN

_STRIDED = torch.strided
_runs_at_once: Callable[[Tensor], bool] = attrgetter("is_cpu")
"""Whether what is done with a tensor is no launch of a kernel, so that nothing is gained by many in one."""


@dataclass(slots=True)
class EngineCall:
    """Parts that go through one engine call, since they share a parameter or a hook."""

    leaves: dict[Node, None]
    parts: list[Part]
    undefined: Sequence[Node] = ()  # leaves that get an undefined gradient, for their hooks


class Accumulator:
    """Adds gradients to the ``.grad`` of leaves, for one W.

    Ask ``writable(leaf)`` first. Call ``add_value`` or ``add_product`` for the parameter that it returns; where it
    returns None, ``queue`` the parts.

    Args:
        leaves: every leaf of this W; gone through once, if at all.
        exact: add in autograd's order: a gradient is computed, then added, each rounded on its own.
        tell_nodes: whether hooks of C++ on AccumulateGrad nodes run.
        mark: a root for every backward of this W, by which hooks that are hidden from it know it.
    """

    def __init__(
        self, leaves: Iterable[Node], exact: bool = False, tell_nodes: bool = True, mark: Tensor | None = None
    ) -> None:
        self._leaves = leaves
        self.exact, self._tell_nodes, self._mark = exact, tell_nodes, mark
        self.is_careful = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}  # by memory of .grad: what is added to it, all in one call
        self._written: list[Tensor] = []
        self._calls: deque[EngineCall] = deque()
        self._hooked = EngineCall({}, [])  # a hook may be on several parameters: all of them in one call
        self._call_of: dict[Node, EngineCall] = {}
        UNSEEN.look()
        self._clean = UNSEEN.clean

    def writable(self, leaf: Node) -> Tensor | None:
        """The leaf's parameter, if its ``.grad`` can be written without the engine.

        It can if the parameter and its node have no Python hooks, and it and its ``.grad`` are ordinary dense tensors.
        """
        parameter: Tensor = leaf.variable
        if type(parameter) not in ORDINARY or self.is_careful or (self._call_of and leaf in self._call_of):
            return None
        before, after, wanted, grad, dtype = fields_for_writing(parameter)
        if before or after or not wanted or (id(parameter) not in self._clean and UNSEEN.on_leaf(leaf)):
            return None
        if grad is None:
            if parameter.layout is not _STRIDED or getattr(parameter, "grad_dtype", dtype) != dtype:
                return None
        elif type(grad) is not Tensor or grad.layout is not _STRIDED or grad.dtype is not dtype or grad.requires_grad:
            return None
        self._written.append(parameter)
        return parameter

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor, scale: complex = 1) -> bool:
        """Add ``scale * left @ right`` to ``parameter.grad`` in the kernel that computes it, unless it cannot be."""
        total = parameter.grad
        if (
            total is None
            or self.exact
            or not (  # under autocast the factors are 16-bit, .grad is 32-bit
                left.dtype is total.dtype is right.dtype
                and (ndim := total.ndim) in (2, 3)
                and left.ndim == ndim == right.ndim
                and total.layout is _STRIDED
            )
        ):
            return False
        add = total.addmm_ if ndim == 2 else total.baddbmm_
        if scale == 1:
            add(left, right)
        else:
            add(left, right, alpha=scale)
        return True

    def add_value(self, parameter: Tensor, value: Tensor) -> None:
        """Add ``value`` to ``parameter.grad``; if that is None, ``value`` may become it, and must be nobody else's."""
        total, value = parameter.grad, sum_to(value, parameter.shape)
        if total is None:
            parameter.grad = value if value.layout != torch.strided else _like_parameter(value, parameter)
        elif total.layout is not _STRIDED:  # an earlier sparse gradient
            parameter.grad = value + total
        elif (
            _runs_at_once(value)
            or value.layout is not _STRIDED
            or value.dtype is not total.dtype
            or (memory := total.data_ptr()) in self._sums  # one call must not write to the same memory twice
        ):
            total.add_(value.to(total.dtype) if self.exact else value)  # autograd rounds before it adds
        else:
            self._sums[memory] = (total, value)

    def flush(self) -> None:
        """Add what ``add_value`` has left to be added together."""
        if self._sums:
            sums = self._sums.values()
            add_each([total for total, _ in sums], [value for _, value in sums])
            self._sums.clear()

    def queue_call(self, call: EngineCall) -> None:
        """Let parts go through the engine; later parts of the same leaves will join them."""
        if any(tensor_hooks(leaf.variable) for leaf in call.leaves):
            self._hooked.leaves.update(call.leaves)
            self._hooked.parts += call.parts
            call = self._hooked
        else:
            self._calls.append(call)
        self._call_of.update(dict.fromkeys(call.leaves, call))

    def queue(self, leaf: Node, parts: list[Part]) -> None:
        """Let parts of one leaf go through the engine."""
        parameter, call = leaf.variable, self._call_of.get(leaf)
        if call is not None:
            call.parts += parts
        elif not needs_grad(parameter):  # frozen since the forward
            return
        elif tensor_hooks(parameter):
            self._call_of[leaf] = self._hooked
            self._hooked.leaves[leaf] = None
            self._hooked.parts += parts
        else:
            self.queue_call(EngineCall({leaf: None}, parts))

    def tensors(self) -> list[Tensor]:
        """The tensors that parts which have yet to go through the engine hold."""
        parts = [part for call in (*self._calls, self._hooked) for part in call.parts]
        return [*(tensor for part in parts for tensor in part.tensors()), *held_behind(parts)]

    def finish(self, undefined: Sequence[Node] = ()) -> None:
        """Make the engine calls, and run the hooks on AccumulateGrad nodes, also of leaves with no gradient."""
        calls = self._calls
        self._hooked.undefined = [leaf for leaf in undefined if _has_hooks(leaf)]
        if self._hooked.parts or self._hooked.undefined:
            calls.append(self._hooked)
        if calls:
            # A hook may run an optimizer, which changes parameters: what is made from one is computed before.
            storages = storage_sizes(leaf.variable for leaf in self._leaves)
            for call in calls:
                for part in call.parts:
                    part.compute_if_made_from(storages)
        while calls:
            self._run(calls.popleft())
        if self._written and self._tell_nodes and in_process_group():
            _run_node_hooks(list({id(parameter): parameter for parameter in self._written}.values()))

    def _run(self, call: EngineCall) -> None:
        edges: list[Any] = []
        values: list[Tensor] = []
        while call.parts:
            part = call.parts.pop(0)
            part.unpack()
            edges.append(GradientEdge(*part.edge))
            values.append(part.value_at_edge())
        if self.is_careful and any(value.isnan().any() for value in values):
            shapes = ", ".join(str(tuple(leaf.variable.shape)) for leaf in call.leaves)
            raise PendingError(
                "W must not compute nan under detect_anomaly",
                got=f"nan in the gradient of the parameter of shape {shapes}",
                fix="look for the operation in the forward whose output goes into this parameter's matrix product",
            )
        if call.undefined:
            edges.append(_undefined([leaf.variable for leaf in call.undefined]))
            values.append(torch.ones_like(edges[-1]))
        if self._mark is not None or len(edges) == 1:  # `will_execute`, which hooks may ask, knows no lone root
            edges.append(torch.empty(0, requires_grad=True) if self._mark is None else self._mark)
            values.append(torch.empty(0))
        torch.autograd.backward(edges, values)


def _has_hooks(leaf: Node) -> bool:
    parameter = leaf.variable
    return bool(tensor_hooks(parameter) or accumulate_hooks(parameter) or UNSEEN.on_leaf(leaf))


def _like_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` in the parameter's dtype and strides, as autograd makes a first ``.grad``."""
    if value.dtype == parameter.dtype and not layout_enforced():
        return value
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if value.dtype == parameter.dtype and (value.stride() == parameter.stride() if dense else value.is_contiguous()):
        return value
    like = torch.empty_like(parameter) if dense else torch.empty_like(parameter, memory_format=torch.contiguous_format)
    return like.copy_(value)


class _Undefined(torch.autograd.Function):
    """A node whose backward sends each parameter's AccumulateGrad node an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_empty((), dtype=torch.float32)  # a backward begins at no complex number

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None,) * ctx.count


def _run_node_hooks(parameters: list[Tensor]) -> None:
    """Run the C++ hooks on AccumulateGrad nodes of parameters whose ``.grad`` was written without the engine.

    DDP's reducer is one: it reduces a bucket when the AccumulateGrad node of each of its parameters has run. An
    undefined gradient runs the node and its hooks, and adds nothing to ``.grad``.
    """
    _undefined(parameters).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _undefined(parameters: list[Tensor]) -> Tensor:
    """A tensor whose backward sends each parameter's AccumulateGrad node an undefined gradient."""
    with torch.enable_grad():
        return _Undefined.apply(*parameters)  # type: ignore[no-untyped-call, no-any-return]  # so is Function.apply
