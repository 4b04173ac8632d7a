"""What a microbatch's loss is of the loss of the batch.

A mean over rows counts by the microbatch's share of the rows. A mean over something else, such as the labels that are
not -100, would be wrong so: the microbatches may have different numbers of them. Then ``loss_fn`` returns a sum and a
count, and the sums are divided by the count of the whole batch. That must be known at the first microbatch, so the
counts of the others are taken with its output and their targets, and compared with what they turn out to be.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from sternway._tree import leaves, replace_leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._own_loss import IGNORED
from sternway.pipeline.forward._plain import PlainAttributes
from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.step._mean import Answer, check_mean, check_numbers, has_rows, numbers_used
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.transport._later import to_host

_STEPS = 8  # in which numbers of the output are looked at: a head of zeros gives the same ones at first

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
"""``loss_fn(output, target)`` returns the mean over the rows, or a sum and the count to divide it by."""


class WeighedLoss:
    """Calls the ``loss_fn`` of one step's microbatches, and weighs each."""

    def __init__(self) -> None:
        self._counts: list[float] = []  # of each microbatch of this step, as far as it was looked ahead
        self._uneven: Callable[[], bool] | None = None
        self._asks, self._answers = True, set[Answer]()  # whether a loss that is one number is the mean over rows
        self._numbers: list[float] | None = None  # those of the output that the loss of a microbatch used
        self._steps = 0  # that were asked about these

    def __call__(self, loss_fn: LossFn, output: Any, microbatch: Microbatch) -> Tensor:
        """This microbatch's part of the loss of the batch."""
        loss = loss_fn(output, microbatch.target)
        if isinstance(loss, tuple) and len(loss) == 2:
            total, count = loss
            targets = microbatch.targets or [microbatch.target]  # a sample has no others
            if not self._counts:
                self._counts = [_count(loss_fn, output, target) for target in targets]
            self._check(_number(count), microbatch.target, targets)
            return not_half(_one_number(total)) / max(sum(self._counts), 1e-12)
        if microbatch.weight < 1 and torch.is_grad_enabled():
            self._ask(loss_fn, output, microbatch)
        loss, self._uneven = _one_number(loss), microbatch.uneven
        if loss.is_cpu:
            self.check_even()
        return not_half(loss) * microbatch.weight

    def _ask(self, loss_fn: LossFn, output: Any, microbatch: Microbatch) -> None:
        """Raise if the loss is not the mean over rows, as far as that can be seen in the first step that has rows."""
        if self._steps < _STEPS:
            used = numbers_used(_aside(loss_fn), output, microbatch.target)
            check_numbers(self._numbers, used)
            self._numbers = used
        if self._asks and has_rows(output, microbatch.target, microbatch.dim):
            self._answers.add(check_mean(_aside(loss_fn), output, microbatch.target, microbatch.dim))

    def check_even(self) -> None:
        """Raise if means were taken that do not add up to the mean of the batch.

        On a GPU it waits until the beginning of the step is done, while the rest of it is waiting to run.
        """
        if self._uneven is not None and self._uneven():
            raise PipelineError(
                f"the targets that are not {IGNORED} are not spread evenly over the microbatches, so means of them do "
                "not add up to the mean of the batch",
                got="a loss_fn that returns one number",
                fix="return (sum, count): the sum of the losses, and how many targets it has",
            )

    def _check(self, count: float, target: Any, targets: list[Any]) -> None:
        ahead = next(c for c, t in zip(self._counts, targets, strict=True) if t is target)
        if ahead != count:
            raise PipelineError(
                "the count that loss_fn returns must depend on the target alone",
                got=f"{count:g} for a microbatch, and {ahead:g} with another output",
                fix="count targets, or compute the mean over rows",
            )

    def clear(self) -> None:
        """The step is over."""
        self._counts.clear()
        self._uneven = None
        self._steps = _STEPS if self._numbers == [] else self._steps + (self._numbers is not None)
        self._numbers = None
        if "never" in self._answers and "seen" not in self._answers:
            warnings.warn(
                "it could not be tried whether loss_fn is the mean over the rows, since it takes no fewer rows than a "
                "microbatch has; if it is not, gradients are not those of the batch: return (sum, count) to say how it "
                "adds up",
                stacklevel=2,
            )
        self._asks = self._asks and not self._answers
        self._answers.clear()


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise PipelineError(
            "loss_fn must return one number", got=got, fix="reduce it, as by .mean(), or return (sum, count)"
        )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss  # a shard of it may be a term of a sum


def _number(count: Any) -> float:
    if isinstance(count, DTensor):
        count = count.full_tensor()
    return float(count.detach() if isinstance(count, Tensor) else count)


def _count(loss_fn: LossFn, output: Any, target: Any) -> float:
    """The count of a target, with the output of another microbatch, of which as many rows are taken."""
    rows = next((len(leaf) for leaf in leaves(target) if isinstance(leaf, Tensor) and leaf.ndim), None)

    def some(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach() if rows is None or not leaf.ndim else leaf.detach()[:rows]

    with torch.no_grad():
        return _number(_aside(loss_fn)(replace_leaves(some, output), target)[1])


def _aside(loss_fn: LossFn) -> Callable[[Any, Any], Any]:
    """The same loss, of which a module's buffers and attributes are not changed: these calls do not count."""
    if not isinstance(loss_fn, nn.Module):
        return loss_fn
    module = loss_fn

    def call(output: Any, target: Any) -> Any:
        if isinstance(module, torch.jit.ScriptModule):  # which cannot be called with other buffers
            with untouched(module):
                return module(output, target)
        copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
        attributes = PlainAttributes(module.modules())
        try:
            return functional_call(module, copies, (output, target)) if copies else module(output, target)
        finally:
            attributes.put_back()

    return call


def not_half(loss: Tensor) -> Tensor:
    """A loss that is a sum of many: in float32 if it is in half precision."""
    return loss if loss.itemsize > 2 else loss.float()


def uneven(targets: list[Any]) -> Callable[[], bool] | None:
    """Whether the integers among the targets that are not -100 are spread unevenly over the microbatches.

    Returns:
        A function that says so, and waits for a GPU if the targets are there; None if there are no such integers.
    """
    labels = [next((t for t in leaves(target) if _is_labels(t)), None) for target in targets]
    shares = [(each != IGNORED).float().mean() for each in labels if each is not None]
    if not shares or len(shares) < len(targets):
        return None
    spread = torch.stack(shares)
    wait = to_host((spread != spread[0]).any().float())
    return lambda: wait()[0][0] > 0


def _is_labels(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.long and bool(leaf.numel())
