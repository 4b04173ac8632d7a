"""Cutting a batch into microbatches, and the weight of each in the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        PipelineError.unless(
            type(self.dim) is int and self.dim >= 0, "dim must be a dimension, from 0 on", self.dim, "pass 0"
        )


@dataclass(frozen=True, slots=True)
class Replicate:
    """Give every microbatch the whole value, such as a mask or a table of positions."""


@dataclass(frozen=True, slots=True)
class Presplit:
    """Each argument is already a sequence with one entry for each microbatch; so are the target and keyword arguments.

    Example:
        >>> pipe.step([ids_0, ids_1], mask=[mask_0, mask_1], target=[goal_0, goal_1])    # doctest: +SKIP
    """


ChunkSpec = Chunk | Replicate | Presplit


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch: arguments for the first stage, for every stage and for the loss."""

    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None
    stage_kwargs: dict[str, Any] | None = None
    target: Any = None
    weight: float = 1.0  # its share of the batch
    rows: int = 0  # of the inputs, along ``dim``; 0 if that is not known
    shares: Tensor | None = None  # its shares of the labels, for a model's own loss; on the rank of the first stage
    dim: int = 0
    targets: list[Any] = field(default_factory=list)  # of all microbatches, on the rank of the last stage
    uneven: Callable[[], bool] | None = None  # whether the targets that count are spread unevenly over microbatches


def cut(value: Any, count: int, spec: ChunkSpec, what: str, rows: int = 0) -> list[Any]:
    """Cut a tree of tensors into ``count`` pieces. What is no tensor goes into each piece unchanged.

    Example:
        >>> [len(piece) for piece in cut(torch.zeros(7, 2), 3, Chunk(0), "the batch")]
        [3, 3, 1]

    Args:
        value: the tree.
        count: how many pieces.
        spec: how to cut.
        what: for errors.
        rows: of the batch, if all tensors must have them. One with a single row goes into each piece: torch would
            stretch it.

    Raises:
        PipelineError: if there are too few rows, or others than those of the batch, or not one entry for each
            microbatch.
    """
    if isinstance(spec, Replicate) or value is None:
        return [value] * count
    if isinstance(spec, Presplit) and isinstance(value, dict):
        named = {name: cut(each, count, spec, name) for name, each in value.items()}
        return [{name: pieces[index] for name, pieces in named.items()} for index in range(count)]
    if isinstance(spec, Presplit):
        rule = f"{what} must be a sequence of {count} with Presplit(), one entry for each microbatch"
        PipelineError.unless(isinstance(value, Sequence), rule, value, "pass a list")
        if len(value) != count:
            raise PipelineError(rule, got=f"{len(value)} entries", fix="pass as many, or change n_microbatches")
        return list(value)
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    pieces = {id(tensor): _pieces(tensor, count, spec.dim, what, rows) for tensor in tensors}

    def piece(index: int) -> Any:
        return replace_leaves(lambda leaf: pieces[id(leaf)][index] if isinstance(leaf, Tensor) else leaf, value)

    return [piece(index) for index in range(count)]


def _pieces(tensor: Tensor, count: int, dim: int, what: str, rows: int) -> tuple[Tensor, ...]:
    if tensor.ndim == 0 or (tensor.ndim > dim and tensor.shape[dim] == 1 < rows):
        return (tensor,) * count
    if tensor.ndim <= dim or (rows or tensor.shape[dim]) < count:
        raise PipelineError(
            f"{what} cannot be cut along dimension {dim} into {count} microbatches",
            got=f"a tensor of shape {tuple(tensor.shape)}",
            fix="pass a larger batch, fewer microbatches, or Replicate() for what every microbatch gets",
        )
    rows, own = rows or tensor.shape[dim], tensor.shape[dim]
    if own % rows and count > 1:
        raise PipelineError(
            f"tensors of a batch must have its rows, since each microbatch gets its own, or a single row for all; the "
            f"batch has {rows}",
            got=f"{own} rows in a tensor of shape {tuple(tensor.shape)}, in {what}",
            fix="pass it with a first dimension of 1 (tensor[None]), expand it to all rows, or cut it yourself, with "
            "Presplit()",
        )
    sizes = [own] if count == 1 else [own // rows * size for size in piece_sizes(rows, count)]
    return torch.split(tensor, sizes, dim)


def piece_sizes(rows: int, count: int) -> list[int]:
    """How many rows each piece gets: all alike but the last, unless that one would be empty.

    Example:
        >>> piece_sizes(7, 3), piece_sizes(6, 4)
        ([3, 3, 1], [2, 2, 1, 1])
    """
    size = -(-rows // count)  # rounded up
    if size * (count - 1) >= rows:
        return [rows // count + (index < rows % count) for index in range(count)]
    return [size] * (count - 1) + [rows - size * (count - 1)]


def rows_of(tree: Any, dim: int) -> int | None:
    """How long the first tensor of a tree is along a dimension; None if none has it."""
    return next((leaf.shape[dim] for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.ndim > dim), None)


def weights(pieces: list[Any], spec: ChunkSpec) -> list[float]:
    """Each microbatch's share of the batch, by rows; equal shares if rows cannot be counted."""
    dim = spec.dim if isinstance(spec, Chunk) else 0
    rows = [rows_of(piece, dim) or 0 for piece in pieces]
    if isinstance(spec, Replicate) or not all(rows):
        return [1 / len(pieces)] * len(pieces)
    return [row / sum(rows) for row in rows]
