"""What travels between stages: a tree of anything, as a list of tensors and a description of the rest.

The description (``Spec``) is what both sides must know before tensors can be received into buffers: the nesting, the
values that are no tensors, and each tensor's shape and dtype, and whether a gradient comes back for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway._tree import leaves, replace_leaves


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a tensor, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class TensorIndex:
    """Stands in a tree for the n-th tensor. Not a dataclass, because ``_tree`` takes those for containers."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorIndex) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"TensorIndex({self.index})"


CONSTANT = (type(None), bool, int, float, str, TensorIndex)
"""Types of values that are compared, and sent again only if they differ."""


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
        wanted = tuple(TensorSpec(t.shape, t.dtype, False) for t in self.tensors if t.needs_grad)
        return Spec([TensorIndex(index) for index in range(len(wanted))], wanted)

    def shapes(self) -> str:
        """The tensors' shapes, for messages."""
        return ", ".join(str(tensor.shape) for tensor in self.tensors) or "no tensors"


Payload = tuple[Spec, list[Tensor]]


def pack(tree: Any) -> Payload:
    """Take the tensors out of a tree."""
    tensors: list[Tensor] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return TensorIndex(len(tensors) - 1)

    shape = replace_leaves(replace, tree)
    return Spec(shape, tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)), tensors


def unpack(spec: Spec, tensors: Sequence[Tensor]) -> Any:
    """Put tensors back into the tree they were taken from."""
    return replace_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorIndex) else leaf, spec.tree)


def as_inputs(spec: Spec, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Received tensors as leaves of a new graph, which require gradients where the sender's did."""
    return [
        tensor.detach().requires_grad_(described.needs_grad)
        for tensor, described in zip(tensors, spec.tensors, strict=True)
    ]
