"""Evaluation: modules in eval mode, and the outputs of the microbatches as one output of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sternway._tree import children, leaves, replace_leaves
from sternway.pipeline.step._stage import Stage


@contextmanager
def in_eval_mode(stages: Mapping[int, Stage]) -> Iterator[None]:
    """A block in which the stages are in eval mode. Afterwards each of their modules is in its own mode again."""
    before = [(module, module.training) for stage in stages.values() for module in stage.all_modules()]
    for stage in stages.values():
        stage.module.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


def joined(outputs: Sequence[Any], rows: Sequence[int], dim: int, losses: Sequence[Tensor], loss: Tensor | None) -> Any:
    """One output of the same kind as those of the microbatches.

    A tensor with as many rows as its microbatch is joined with those of the others. A value that is the same in all is
    kept. A model's own losses become the loss of the batch. Anything else becomes a list, by microbatch.

    Args:
        outputs: of each microbatch.
        rows: how many each microbatch has.
        dim: where the rows are.
        losses: the model's own, among the outputs.
        loss: of the batch.
    """
    shapes = [[type(part) for part in _nodes(output)] for output in outputs]
    if any(shape != shapes[0] for shape in shapes):
        return list(outputs)
    by_place = zip(*(leaves(output) for output in outputs), strict=True)
    own = {id(each) for each in losses}
    return replace_leaves(lambda _: _joined_leaf(next(by_place), rows, dim, own, loss), outputs[0])


def _joined_leaf(values: tuple[Any, ...], rows: Sequence[int], dim: int, own: set[int], loss: Tensor | None) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first if all(type(value) is type(first) and value == first for value in values) else list(values)
    if id(first) in own and loss is not None:
        return loss
    others = {(*value.shape[:dim], *value.shape[dim + 1 :]) for value in values}
    if len(others) == 1 and all(t.ndim > dim and t.shape[dim] == n for t, n in zip(values, rows, strict=True)):
        return torch.cat(values, dim)
    return list(values)


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for _, part in children(tree) or ():
        yield from _nodes(part)
