"""A model's own loss over microbatches.

transformers' models return a mean over the labels that are not -100. The mean of the batch is not the mean of the
microbatches' means if these have different numbers of such labels, so each counts by its share of them. Whether the
first label of each row counts too, or labels are shifted, or the model returns a sum, is found by a trial: the last
stage computes the loss of all labels of a microbatch, of some of them, and of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError, SternwayError

LABELS = "labels"
IGNORED = -100
_RULES = ("a mean over the labels", "a mean over the labels but the first of each row", "a sum")
_SUM = 2
_FIX = (
    "pass loss_fn=, a function of output and target; for the model's own loss, if it is a mean over the rows: lambda "
    "output, target: (output.loss * len(target), len(target))"
)


def loss_of(output: Any) -> Tensor:
    """The loss that a model returned.

    Raises:
        PipelineError: if it returned none.
    """
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise PipelineError(
            "training without loss_fn= needs a model that returns its loss",
            got=f"a {type(output).__name__} without one",
            fix="pass labels= to step, or loss_fn= to Pipeline",
        )
    return found.full_tensor() if isinstance(found, DTensor) else found


def shares(labels: list[Any]) -> list[Tensor] | list[None]:
    """Each microbatch's share of the batch's labels, by each rule; None if these are not labels that can be counted."""
    if not all(isinstance(each, Tensor) and not each.is_floating_point() and each.ndim in (1, 2) for each in labels):
        return [None] * len(labels)
    counts = torch.stack([label_counts(each) for each in labels])
    found = counts / counts.sum(0).clamp(min=1)
    found[:, _SUM] = 1
    return list(found)


def filled(labels: Tensor, rule: int) -> Tensor:
    """Labels of which one counts if none did, so that a mean of them is a number. Its share of the batch is 0 then."""
    if rule == _SUM:
        return labels
    last = torch.zeros_like(labels, dtype=torch.bool)
    last.view(-1)[-1] = True
    return torch.where(last & (label_counts(labels)[rule] == 0), torch.zeros_like(labels), labels)


def no_shares() -> PipelineError:
    """The error if microbatches cannot be weighed."""
    return PipelineError(
        "training in microbatches without loss_fn= needs labels= of integers, by which they are weighed",
        got="none, or of another type",
        fix=_FIX,
    )


def label_counts(labels: Tensor) -> Tensor:
    """How much labels count in a mean, by each rule."""
    counted = (labels != IGNORED).double()
    shifted = counted[..., 1:] if labels.ndim > 1 else counted
    return torch.stack([counted.sum(), shifted.sum(), torch.ones_like(counted.sum())])


@contextmanager
def trial() -> Iterator[None]:
    """A block in which a model computes its loss with some of the labels."""
    try:
        yield
    except SternwayError:
        raise
    except Exception as error:
        raise PipelineError(
            "the model's own loss must take rows without labels, to find how it averages",
            got=f"{type(error).__name__}: {error}",
            fix=_FIX,
        ) from error


def find_rule(labels: Tensor, loss_with: Callable[[Tensor], Tensor]) -> int:
    """How the model's loss averages: the place of its rule in the shares.

    Args:
        labels: of one microbatch.
        loss_with: the loss of that microbatch with other labels.

    Raises:
        PipelineError: if it is no mean and no sum over the labels, or they are too few to tell.
    """
    rule = 0
    if labels.ndim == 2:
        first = labels.new_full(labels.shape, IGNORED)
        first[:, 0] = labels.clamp(min=0)[:, 0]
        alone = loss_with(first)
        rule = 0 if bool(alone.isfinite() & (alone != 0)) else 1
    parts = _parts(labels, rule)
    if parts is None:
        raise PipelineError(
            "the model's own loss averages in a way that is not seen from so few labels",
            got=f"labels of shape {tuple(labels.shape)}, {int((labels != IGNORED).sum())} of which count",
            fix="begin with a batch whose first microbatch has labels in two rows",
        )
    whole, *losses = (loss_with(each).double() for each in (labels, *parts))
    numbers, *weights = (label_counts(each) for each in (labels, *parts))
    for place in (rule, _SUM):
        total = sum(weight[place] * loss for weight, loss in zip(weights, losses, strict=True))
        if torch.isclose(torch.as_tensor(total), whole * numbers[place], rtol=1e-4, atol=1e-7):
            return place
    raise PipelineError(
        "the model's own loss must be " + ", or ".join(_RULES) + ", to be computed in microbatches",
        got="another loss",
        fix=_FIX,
    )


def check_term(labels: Tensor, grads_with: Callable[[Tensor], list[Tensor]]) -> bool:
    """Raise if a model's loss has a term that does not follow the labels, as one that balances experts.

    Of such a term it is not known how it adds up. Where all labels are of one row, a loss of labels has no gradient for
    other rows; a term has, and the same one whatever these labels are.

    Args:
        labels: of one microbatch.
        grads_with: the gradients of what the last stage received, with other labels.

    Returns:
        Whether that could be tried: there are two rows, and two labels that differ.
    """
    if len(labels) < 2:
        return False
    counted = labels != IGNORED
    values: Tensor = torch.unique(labels[counted])
    if len(values) < 2:
        return False
    row = int(counted.view(len(labels), -1).sum(1).argmax())
    is_row = torch.arange(len(labels), device=labels.device) == row
    chosen = counted & is_row.view(-1, *[1] * (labels.ndim - 1))
    changed = values.roll(-1)[torch.searchsorted(values, labels.clamp(min=values[0]).contiguous())]
    pairs = zip(*(grads_with(torch.where(chosen, each, IGNORED)) for each in (labels, changed)), strict=True)
    for one, other in pairs:
        if len(one) == len(labels) and _are_some(one[~is_row], other[~is_row]):
            raise PipelineError(
                "the model's own loss has a term that does not follow labels=, of which it is not known how it adds up",
                got="a gradient of rows that have no labels",
                fix=_FIX,
            )
    return True


def _are_some(one: Tensor, other: Tensor) -> bool:
    """Whether gradients are not zeros, and alike."""
    return bool((one.abs() > 0).any()) and torch.allclose(one, other, rtol=1e-3, atol=0)


def nothing_moved() -> AbstractContextManager[Any]:
    """A block in which what autograd saves stays where it is, whatever policy there is."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _parts(labels: Tensor, rule: int) -> tuple[Tensor, Tensor] | None:
    """The same labels in two parts: by rows, since the labels of a row may also be inputs of the row."""
    rows = torch.arange(len(labels), device=labels.device)
    places = rows[:, None] if labels.ndim == 2 else rows
    if len(labels) == 1 and labels.ndim == 2:
        places = torch.arange(labels.shape[1], device=labels.device)[None]
    for end in range(1, int(places.max()) + 1):
        first, second = (torch.where(chosen, labels, IGNORED) for chosen in (places < end, places >= end))
        if bool(label_counts(first)[rule]) and bool(label_counts(second)[rule]):
            return first, second
    return None
