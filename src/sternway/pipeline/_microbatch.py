"""A batch cut into microbatches, and how much each weighs in the whole batch's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sternway._tree import leaves, replace_leaves
from sternway.errors import PipelineError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Cut tensors along ``dim``; the last piece may be smaller. The default is ``Chunk(0)``."""

    dim: int = 0

    def __post_init__(self) -> None:
        PipelineError.unless(type(self.dim) is int and self.dim >= 0, "a dimension counts from 0", self.dim, "pass 0")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Give every microbatch the whole value: a mask, a table of positions."""


@dataclass(frozen=True, slots=True)
class Presplit:
    """The value is a sequence with one entry for each microbatch, cut already."""


ChunkSpec = Chunk | Replicate | Presplit


def cut(value: Any, count: int, spec: ChunkSpec, what: str) -> list[Any]:
    """``count`` pieces of a tree of tensors; what is no tensor goes to each piece as it is.

    Example:
        >>> [len(piece) for piece in cut(torch.zeros(7, 2), 3, Chunk(0), "the batch")]
        [3, 3, 1]

    Raises:
        PipelineError: too few rows for ``count`` pieces, or not one entry a microbatch.
    """
    if isinstance(spec, Replicate) or value is None:
        return [value] * count
    if isinstance(spec, Presplit):
        PipelineError.unless(isinstance(value, Sequence), f"{what}, given ready, is a sequence", value, "pass a list")
        if len(value) != count:
            raise PipelineError(
                f"{what}, given ready, has one entry for each microbatch",
                got=f"{len(value)} entries for {count} microbatches",
                fix=f"pass a sequence of {count}, or another number of microbatches",
            )
        return list(value)
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    pieces = {id(tensor): _pieces(tensor, count, spec.dim, what) for tensor in tensors}

    def piece(index: int) -> Any:
        return replace_leaves(lambda leaf: pieces[id(leaf)][index] if isinstance(leaf, Tensor) else leaf, value)

    return [piece(index) for index in range(count)]


def _pieces(tensor: Tensor, count: int, dim: int, what: str) -> tuple[Tensor, ...]:
    if tensor.ndim <= dim or tensor.shape[dim] < count:
        raise PipelineError(
            f"{what} is cut along dimension {dim} into {count} microbatches",
            got=f"a tensor of shape {tuple(tensor.shape)}",
            fix="pass a larger batch, fewer microbatches, or Replicate() for what every microbatch gets",
        )
    rows = tensor.shape[dim]
    size = -(-rows // count)  # rounded up: all alike but the last
    if size * (count - 1) >= rows:  # then the last would be empty; as even as it gets instead
        return torch.tensor_split(tensor, count, dim)
    return torch.split(tensor, size, dim)


def weights(pieces: list[Any], spec: ChunkSpec) -> list[float]:
    """Each microbatch's share of the batch, by rows; equal shares where rows cannot be counted."""
    dim = spec.dim if isinstance(spec, Chunk) else 0
    rows = [
        next((leaf.shape[dim] for leaf in leaves(piece) if isinstance(leaf, Tensor) and leaf.ndim > dim), 0)
        for piece in pieces
    ]
    if isinstance(spec, Replicate) or not all(rows):
        return [1 / len(pieces)] * len(pieces)
    return [row / sum(rows) for row in rows]
