"""A cut, where the backward divides into I and W, and the parts of W that begin there.

A part goes through three states: planned (an operand of a cut, and its rule), read (the rule has read the saved tensors
that W needs), and complete (I has computed the gradient of the cut's output).

A rule reads saved tensors that the node itself reads when it runs. Hooks may have packed them:

- no hooks: the rule and the node read the same tensor.
- ``torch.utils.checkpoint`` (``use_reentrant=False``): the first read recomputes the region, and each tensor may be
  read once in a backward. The rule reads just before the engine runs the node, so that there is one recomputation, at
  its usual time; a second read is allowed for it.
- ``sternway.saved``: the rule gets the packed object, and W unpacks it.
- other hooks (``save_on_cpu``, a user's own): unpacking may be slow, and may count. The node unpacks what it saved even
  if only its input gradient is asked for, so deferring would unpack twice. Such a node runs whole in I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sternway._storage import lies_in, storage_sizes
from sternway._torch import require
from sternway._torch.autograd import gradient_slots
from sternway._torch.nodes import (
    ACCUMULATE_GRAD,
    CHECKPOINT_HOLDER,
    TRANSPOSE,
    T,
    allow_more_reads,
    packed_by_hooks,
    raw_data,
    signed,
    transposed_dims,
)
from sternway._torch.operands import lies_by_columns, strides_of_side
from sternway._torch.tensors import version_of, without_torch_function
from sternway.errors import PendingError, SplitError
from sternway.saved import Packed, Policy
from sternway.split._later import Later, Product
from sternway.split._rules import RuleFunction

Node = Any  # an autograd node; torch.autograd.graph.Node lacks `variable`
Edge = tuple[Node, int]  # a node, and which of its outputs


def leaves_behind(edge: Edge) -> list[Node]:
    """Every leaf (AccumulateGrad node) that ``edge`` leads to."""
    found: dict[Node, None] = {}
    stack, seen = [edge[0]], {edge[0]}
    while stack:
        node = stack.pop()
        if type(node) is ACCUMULATE_GRAD:
            found[node] = None
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        stack += new
    return list(found)


def is_transpose(node: Node) -> bool:
    """Whether a node is that of an operation that swaps the last two dimensions."""
    kind = type(node)
    if kind is not T and kind is not TRANSPOSE:
        return False
    ndim = len(gradient_slots(node)[0].shape)
    if kind is T:
        return ndim == 2  # that of a vector is the vector
    return {signed(dim) % ndim for dim in transposed_dims(node)} == {ndim - 2, ndim - 1}


def sum_to(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` summed over the dimensions in which its operand was broadcast."""
    if value.shape == shape:
        return value
    if value.shape[1:] == shape:
        return value.sum(0)
    return value.sum_to_size(shape) if value.numel() else value.new_zeros(shape)  # a sum over nothing


Packing = Literal["checkpoint", "ours", "foreign"] | None
"""Which hooks packed a node's saved tensors, if any."""


def packing(node: Node) -> Packing:
    """Which hooks packed the node's saved tensors; "foreign" if they are of several kinds."""
    return packing_of(packed_by_hooks(node))


def packing_of(packed: list[Any]) -> Packing:
    """Which hooks made what stands for a node's saved tensors."""
    if not packed:
        return None
    if all(isinstance(data, CHECKPOINT_HOLDER) for data in packed):
        require("split.checkpoint")
        return "checkpoint"
    if all(isinstance(data, Packed) for data in packed):
        return "ours"
    return "foreign"


def changed_between(grad: Tensor) -> PendingError:
    """The error if the gradient that I kept at a cut, or what W needs beside it, was changed in place since."""
    return PendingError(
        "a tensor that W needs must not be changed in place between I and W",
        got=f"a changed gradient of shape {tuple(grad.shape)}, or a changed operand of its node",
        fix="change a copy, or call pending.run() first",
    )


def changed_in_i(grad: Tensor) -> SplitError:
    """The error if the gradient that was kept at a cut was changed in place later in I."""
    return SplitError(
        "a gradient must not be changed in place while I runs: W needs it as it arrived",
        got=f"a hook, or the backward of a custom Function, that changed a gradient of shape {tuple(grad.shape)}",
        fix="return a changed copy there, such as 2 * grad for grad.mul_(2)",
    )


class _KeptPacked:
    """A node whose saved tensors are read without unpacking what ``sternway.saved`` packed."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        data = raw_data(self._node, name)
        return data if isinstance(data, Packed) else getattr(self._node, name)


class Part:
    """One term of a parameter's gradient: ``later.gradient(grad)``, or ``grad`` itself.

    Args:
        edge: where in the graph it goes.
        leaf: the parameter's AccumulateGrad node, if the edge leads straight to it.
        transposed: whether the parameter is the transpose of the operand.
        position: the operand's index in ``node.next_functions`` of the cut.
        rule: reads ``later`` off the cut's node.
    """

    __slots__ = ("edge", "grad", "later", "leaf", "packed", "position", "rule", "strides", "transposed", "version")

    grad: Tensor
    version: int

    def __init__(
        self,
        edge: Edge,
        leaf: Node | None,
        transposed: bool = False,
        position: int = 0,
        rule: RuleFunction | None = None,
    ) -> None:
        self.edge = edge
        self.leaf = leaf
        self.transposed = transposed
        self.position = position
        self.rule = rule
        self.later: Later | None = None
        self.strides: tuple[int, ...] = ()  # of a product's side that is no parameter
        self.packed: Packed | None = None  # stands for grad, while a policy has it

    @classmethod
    def of_leaf(cls, leaf: Node, grad: Tensor, later: Later | None = None) -> Part:
        """A complete part that goes straight to a leaf."""
        part = cls((leaf, 0), leaf)
        if later is not None:
            part.later = later
        part.grad, part.version = grad, version_of(grad)
        return part

    def leaves(self) -> list[Node]:
        """Every leaf that the part contributes to."""
        return [self.leaf] if self.leaf is not None else leaves_behind(self.edge)

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are held for W."""
        grad = [self.grad] if self.packed is None else self.packed.tensors()
        return (*grad, *(self.later.tensors() if self.later is not None else ()))

    def pack(self, policy: Policy) -> None:
        """Pack the tensors that are held, until ``unpack()``."""
        if self.packed is None:
            self.check()
            self.packed = policy.pack(self.grad)
            self.grad = self.grad.new_empty(0)
            if self.later is not None:
                self.later.pack(policy.pack)

    @property
    def is_packed(self) -> bool:
        """Whether some of what is held is packed."""
        return self.packed is not None or (self.later is not None and self.later.is_packed)

    def unpack(self) -> None:
        """Unpack what is packed, and check that nothing was changed."""
        if self.packed is not None:
            self.grad, self.packed = self.packed.unpack(), None
            self.version = version_of(self.grad)
        if self.later is not None:
            self.later.unpack()
        self.check()

    def check(self) -> None:
        """Raise PendingError if a tensor was changed in place since I, as autograd does for saved tensors."""
        grad_changed = self.packed is None and version_of(self.grad) != self.version
        if grad_changed or (self.later is not None and self.later.was_changed()):
            raise changed_between(self.grad)

    def keep_apart(self, written: Set[int]) -> None:
        """Hold copies of what lies in one of these storages, to which W writes."""
        if self.later is not None:
            self.later.keep_apart(written)
        for each in (self.grad,) if self.packed is None else self.packed.tensors():
            if lies_in(each, written):
                self.unpack()
                self.grad = self.grad.clone()
                self.version = version_of(self.grad)
                break

    def value(self, transposed: bool = False) -> Tensor:
        """The operand's gradient, its last two dimensions swapped if ``transposed``.

        A product is computed as autograd does, which goes by how the operand lies in memory. The transpose of another
        product may differ in the last bit.
        """
        if isinstance(self.later, Product):
            by_columns = self._lies_by_columns()
            value = self.later.gradient(self.grad, by_columns)
            return value if by_columns == transposed else value.mT
        if self.later is not None:
            return self.later.gradient(self.grad, transposed)
        return self.grad.mT if transposed else self.grad

    def _lies_by_columns(self) -> bool:
        with without_torch_function():  # a subclass may refuse to be read
            if self.grad.ndim != 2 or any(each.layout is not torch.strided for each in self.tensors()):
                return False
            if self.leaf is None:
                node, index = self.edge
                return lies_by_columns(gradient_slots(node)[index].shape, self.strides)
            parameter = self.leaf.variable
            if parameter.layout is not torch.strided:
                return False
            shape, strides = parameter.shape, parameter.stride()
            return lies_by_columns(shape[::-1], strides[::-1]) if self.transposed else lies_by_columns(shape, strides)

    def value_at_edge(self) -> Tensor:
        """The operand's gradient, summed over broadcast dimensions, as the engine takes it."""
        node, index = self.edge
        return sum_to(self.value(), tuple(gradient_slots(node)[index].shape))

    def compute_if_made_from(self, storages: dict[int, int]) -> None:
        """Compute the value now, if it is made from a tensor in one of these storages."""
        if self.later is not None and not storages.keys().isdisjoint(storage_sizes(self.later.tensors())):
            self.unpack()
            self.grad, self.later = self.value_at_edge(), None
            self.version = version_of(self.grad)


class Cut:
    """A node on the spine some of whose operands are deferred.

    Args:
        node: the node.
        parts: the deferred operands.
        packing: which hooks packed its saved tensors.
        runs_in_i: False where nothing below it needs a gradient, as at the bottom of stage 0.
        holders: what a checkpoint packed the saved tensors as.
    """

    __slots__ = ("grads", "holders", "node", "packing", "parts", "runs_in_i", "versions")

    def __init__(
        self, node: Node, parts: list[Part], packing: Packing, runs_in_i: bool, holders: Sequence[Any] = ()
    ) -> None:
        self.node = node
        self.parts = parts
        self.packing = packing
        self.runs_in_i = runs_in_i
        self.holders = holders
        self.grads: list[tuple[Tensor | None, ...]] = []  # what arrived at the node: one entry, after I
        self.versions: list[int] = []  # of the gradient as it arrived, where I runs what may change it

    @property
    def is_read_as_it_runs(self) -> bool:
        """Whether the rules read just before the node runs, when what is packed is unpacked anyway."""
        return self.runs_in_i and self.packing is not None

    def read(self) -> None:
        """Let the rules read what W needs off the node."""
        node = _KeptPacked(self.node) if self.packing == "ours" else self.node
        for part in self.parts:
            part.later = part.rule(node)  # type: ignore[misc]  # every part of a cut has a rule
            if part.leaf is None:
                part.strides = strides_of_side(self.node, part.position)

    def read_and_keep(self, grads: tuple[Tensor | None, ...]) -> None:
        """A hook that runs just before the node: read, and keep the gradient that arrived."""
        if self.packing == "checkpoint":
            for holder in self.holders:
                allow_more_reads(holder, times=len(self.parts))
            self.holders = ()  # whoever has a holder keeps what was recomputed for it
        self.read()
        self.keeping()(grads)

    def keeping(self) -> Callable[[tuple[Tensor | None, ...]], None]:
        """A hook that runs just before the node: it keeps the gradient that arrived, and its version.

        The node holds the hook, so that the hook must not hold the node.
        """
        return partial(_keep, self.grads, self.versions)

    def keep(self, grad: Tensor | None) -> None:
        """Keep the gradient that arrived at a node that did not run; what a checkpoint recomputes is read now."""
        if self.packing == "checkpoint" and grad is not None:
            self.read_and_keep((grad,))
        else:
            self.grads.append((grad,))


def _keep(kept: list[tuple[Tensor | None, ...]], versions: list[int], grads: tuple[Tensor | None, ...]) -> None:
    kept.append(grads)
    if grads[0] is not None:
        versions.append(version_of(grads[0]))
