"""What travels between stages: a tree of anything, as a list of tensors and a description of the rest.

The description (``Spec``) is what both ends must agree on before tensors can be received into buffers: the nesting,
the values that are no tensors, and each tensor's shape, type and whether a gradient comes back for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway._tree import replace_leaves


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's shape and type, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


class Place:
    """Stands in a tree where the n-th tensor goes. No dataclass: those are containers."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"Place({self.index})"


@dataclass(frozen=True, slots=True)
class Spec:
    """A payload without its numbers."""

    tree: Any
    tensors: tuple[TensorSpec, ...]

    def gradients(self) -> Spec:
        """What comes back for it: one gradient for each tensor that needs one."""
        wanted = tuple(TensorSpec(t.shape, t.dtype, False) for t in self.tensors if t.needs_grad)
        return Spec([Place(index) for index in range(len(wanted))], wanted)


def pack(tree: Any) -> tuple[Spec, list[Tensor]]:
    """Take the tensors out of a tree."""
    tensors: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return Place(len(tensors) - 1)

    shape = replace_leaves(place, tree)
    return Spec(shape, tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)), tensors


def unpack(spec: Spec, tensors: Sequence[Tensor]) -> Any:
    """Put them back."""
    return replace_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, Place) else leaf, spec.tree)


def as_inputs(spec: Spec, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Received tensors as leaves of a new graph, needing a gradient where the sender's did."""
    return [
        tensor.detach().requires_grad_(described.needs_grad)
        for tensor, described in zip(tensors, spec.tensors, strict=True)
    ]
