"""The arguments of one step, and the microbatches that they make on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway._tree import CONSTANT, leaves, tensor_places
from sternway.errors import PipelineError
from sternway.pipeline.forward._own_loss import LABELS, shares
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.step._loss import uneven
from sternway.pipeline.step._microbatch import (
    Chunk,
    ChunkSpec,
    Microbatch,
    Presplit,
    cut,
    piece_sizes,
    rows_of,
    weights,
)
from sternway.pipeline.step._slices import shapes_of
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.transport import _later
from sternway.pipeline.transport._facts import checksum, sample_checksum
from sternway.pipeline.transport._payload import pack
from sternway.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of ``Pipeline.step`` that are data."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Any
    stage_kwargs: dict[str, Any] | None

    def rows(self, chunk: ChunkSpec) -> int:
        """How many rows the inputs have; 0 if they are not cut, or not there. Others may have a single row for all."""
        if not isinstance(chunk, Chunk):
            return 0
        tensors = [leaf for leaf in leaves([self.inputs, self.keywords]) if isinstance(leaf, Tensor)]
        return next((rows for leaf in tensors if (rows := rows_of(leaf, chunk.dim) or 0) > 1), 0) or (
            rows_of(tensors, chunk.dim) or 0
        )

    def shapes(self, training: bool) -> str:
        """What processes that have slices of the same sequences must have alike."""
        return f"{'step' if training else 'evaluate'} with {shapes_of([*self.inputs, self.keywords, self.target])}"

    def target_checksum(self, chunk: ChunkSpec, rows: int, *, may_wait: bool) -> int:
        """A number that most likely differs where targets do.

        It is 0 without a target, for one on a GPU if we may not wait, and for one with other rows, which is refused.
        """
        if isinstance(chunk, Chunk) and rows_of(self.target, chunk.dim) != rows:
            return 0
        tensors = [leaf for leaf in leaves(self.target) if isinstance(leaf, Tensor)]
        if any(isinstance(t, DTensor) or t.layout != torch.strided or t.is_meta for t in tensors):
            return 0
        if not tensors or not (may_wait or all(map(_later.is_here, tensors))):
            return 0
        return checksum(repr([sample_checksum(tensor) for tensor in tensors]))

    def cut(
        self, stages: dict[int, Stage], schedule: Schedule, chunk: ChunkSpec, training: bool, rows: int
    ) -> list[Microbatch]:
        """The microbatches, with what the stages of this process need of each. The whole batch has ``rows`` rows.

        Raises:
            PipelineError: if inputs are missing for the first stage, or a loss or target for the last, or there are too
                few rows.
        """
        count, last = schedule.n_microbatches, schedule.num_stages - 1
        has_loss = last in stages and stages[last].loss_fn is not None
        by_model = last in stages and getattr(stages[last].module, "sternway_uses_own_loss", False)
        if training and last in stages and not by_model and (not has_loss or self.target is None):
            raise PipelineError(
                "training needs a loss and a target on the rank of the last stage",
                got="no loss" if not has_loss else "no target",
                fix="pass loss_fn= to Pipeline and target= to step, at least on that rank",
            )
        if 0 in stages and not self.inputs and not self.keywords:
            raise PipelineError("the rank of the first stage needs the batch", got="no inputs", fix="pass it to step")
        if self.stage_kwargs is not None and not isinstance(self.stage_kwargs, dict):
            raise PipelineError(
                "stage_kwargs must be a dict of keyword arguments",
                got=type(self.stage_kwargs).__name__,
                fix="pass {name: value}",
            )
        arguments = self._cut_inputs(count, chunk, rows) if 0 in stages else [()] * count
        named = cut(self.keywords, count, chunk, "the batch", rows) if 0 in stages else [None] * count
        targets = cut(self.target, count, chunk, "the target") if last in stages else [None] * count
        shared = cut(self.stage_kwargs, count, chunk, "stage_kwargs", rows)
        parts = weights(targets if self.target is not None else arguments, chunk)
        labels = [None] * count if 0 not in stages else [(each or {}).get(LABELS) for each in named]
        whole = 0 in stages and isinstance(stages[0].module, ModelPart)
        of_labels = shares(labels) if whole else [None] * count
        is_uneven = uneven(targets) if has_loss else None
        sizes = piece_sizes(rows, count) if rows >= count else [0] * count
        dim = chunk.dim if isinstance(chunk, Chunk) else 0
        return [
            Microbatch(*own, share, size, of_own, dim, targets, is_uneven)
            for own, share, size, of_own in zip(
                zip(arguments, named, shared, targets, strict=True), parts, sizes, of_labels, strict=True
            )
        ]

    def _cut_inputs(self, count: int, chunk: ChunkSpec, rows: int) -> list[tuple[Any, ...]]:
        if not isinstance(chunk, Presplit):
            return cut(self.inputs, count, chunk, "the batch", rows)
        each = [cut(value, count, chunk, "the batch") for value in self.inputs]
        return [tuple(pieces[index] for pieces in each) for index in range(count)]


def shapes_checksum(microbatches: list[Microbatch], modes: list[bool]) -> int:
    """A number that changes when the shapes or names of a batch do, or values that are no tensors, or the modes.

    Modes are those of modules, and whether parameters are frozen: what is sent may need a gradient then, or not.
    """
    specs = [pack([m.arguments, m.keywords, m.stage_kwargs])[0] for m in microbatches]
    tensors = [[(t.shape, str(t.dtype)) for t in spec.tensors] for spec in specs]
    constants = [[leaf for leaf in leaves(spec.tree) if isinstance(leaf, CONSTANT)] for spec in specs]
    names = [(tuple(m.keywords or ()), tensor_places(spec.tree)) for m, spec in zip(microbatches, specs, strict=True)]
    return checksum(repr([tensors, constants, names, modes]))
