"""What travels between stages: a tree of anything, as a list of tensors and a description of the rest.

The description (``Spec``) is what both sides must know before tensors can be received into buffers: the nesting, the
values that are no tensors, and each tensor's shape and dtype, and whether a gradient comes back for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway._tree import CONSTANT, TensorIndex, leaves, replace_leaves, take_tensors
from sternway.pipeline.transport._shards import ShardLayout


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a tensor, and whether a gradient comes back for it.

    ``order`` is the order of its dimensions in memory, as of channels last; None if they are in order. It decides how
    the tensor is sent, and not whether two descriptions are the same.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    order: tuple[int, ...] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The description of a tensor."""
        order = None
        if not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor):
            strides = tensor.stride()
            order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape of what ``in_memory`` returns."""
        return self.shape if self.order is None else tuple(self.shape[dim] for dim in self.order)

    def empty(self, device: torch.device) -> Tensor:
        """A tensor for what ``in_memory`` returns."""
        return torch.empty(self.memory_shape, dtype=self.dtype, device=device)

    def in_memory(self, tensor: Tensor) -> Tensor:
        """A tensor as it is sent: contiguous, with its dimensions as they are in memory."""
        return (tensor if self.order is None else tensor.permute(self.order)).contiguous()

    def in_order(self, received: Tensor) -> Tensor:
        """The inverse of ``in_memory``."""
        if self.order is None:
            return received
        return received.permute([self.order.index(dim) for dim in range(len(self.order))])


class ShardIndex(TensorIndex):
    """Stands in a tree for a DTensor: the n-th tensor is this rank's shard of it."""

    __slots__ = ("layout",)

    def __init__(self, index: int, layout: ShardLayout) -> None:
        super().__init__(index)
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardIndex) and (other.index, other.layout) == (self.index, self.layout)

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"ShardIndex({self.index}, {self.layout})"


@dataclass(frozen=True, slots=True)
class Spec:
    """A payload without the tensors' contents."""

    tree: Any
    tensors: tuple[TensorSpec, ...]

    @property
    def varies(self) -> bool:
        """Whether the tree holds values that may differ from step to step without notice."""
        return any(getattr(leaf, "varies", not isinstance(leaf, CONSTANT)) for leaf in leaves(self.tree))

    def gradients(self) -> Spec:
        """The spec of what comes back: one gradient for each tensor that needs one."""
        wanted = tuple(TensorSpec(t.shape, t.dtype, False, t.order) for t in self.tensors if t.needs_grad)
        return Spec([TensorIndex(index) for index in range(len(wanted))], wanted)

    def kinds(self) -> str:
        """The tensors' dtypes, and which of them need gradients, for messages."""
        kinds = (f"{str(each.dtype).removeprefix('torch.')} {'with' if each.needs_grad else 'without'} gradient"
                 for each in self.tensors)  # fmt: skip
        return ", ".join(kinds)

    def shapes(self) -> str:
        """The tensors' shapes, for messages."""
        return ", ".join(str(tensor.shape) for tensor in self.tensors) or "no tensors"


Payload = tuple[Spec, list[Tensor]]


def pack(tree: Any, *, shards: bool = False) -> Payload:
    """Take the tensors out of a tree; with ``shards``, of DTensors this rank's shard, which is differentiable."""
    shape, tensors = take_tensors(tree)
    if shards:
        layouts = [ShardLayout.of(each) if isinstance(each, DTensor) else None for each in tensors]
        if any(layouts):
            tensors = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
            shape = replace_leaves(lambda leaf: _noted(leaf, layouts), shape)
    return Spec(shape, tuple(TensorSpec.of(t) for t in tensors)), tensors


def _noted(leaf: Any, layouts: Sequence[ShardLayout | None]) -> Any:
    """A leaf of a tree, with its layout if it stands for a DTensor."""
    layout = layouts[leaf.index] if isinstance(leaf, TensorIndex) else None
    return leaf if layout is None else ShardIndex(leaf.index, layout)


def unpack(spec: Spec, tensors: Sequence[Tensor], parameters: Callable[[], Iterable[Tensor]] = tuple) -> Any:
    """Put tensors back into the tree they were taken from. Shards become DTensors on the mesh of some parameter."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, TensorIndex):
            return leaf
        tensor = tensors[leaf.index]
        return leaf.layout.join(tensor, parameters()) if isinstance(leaf, ShardIndex) else tensor

    return replace_leaves(replace, spec.tree)


def as_inputs(spec: Spec, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Received tensors as leaves of a new graph, which require gradients where the sender's did."""
    return [
        tensor.detach().requires_grad_(described.needs_grad)
        for tensor, described in zip(tensors, spec.tensors, strict=True)
    ]
