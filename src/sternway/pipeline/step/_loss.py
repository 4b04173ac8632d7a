"""What a microbatch's loss is of the loss of the batch.

A mean over rows counts by the microbatch's share of the rows. A mean over something else, such as the labels that are
not -100, would be wrong so: the microbatches may have different numbers of them. Then ``loss_fn`` returns a sum and a
count, and the sums are divided by the count of the whole batch. That must be known at the first microbatch, so the
counts of the others are taken with its output and their targets, and compared with what they turn out to be.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
from sternway.pipeline.step._mean import Answer, Rows, check_mean, check_numbers, check_positions, numbers_used
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._slices import SliceCounts, Slices
from sternway.pipeline.transport import _later
from sternway.pipeline.transport._collective import Collective

_STEPS = 8  # in which numbers of the output are looked at: a head of zeros gives the same ones at first

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]
"""``loss_fn(output, target)`` returns the mean over the rows, or a sum and the count to divide it by."""

_Count = Tensor | float
_LEAST = 1e-12


class WeighedLoss:
    """Calls the ``loss_fn`` of one step's microbatches, and weighs each."""

    def __init__(self, slices: Slices | None = None, copies: Collective | None = None) -> None:
        self._slices = slices  # the processes that have the rest of the sequences, if there are some
        self._copies = copies  # those that get other data, over which gradients are averaged
        self._more: _Count | None = None  # how many times the count of this one's data that of all is, on average
        self._shared: SliceCounts | None = None  # what the losses of all of them count in this step
        self._asks_positions, self._asked_positions = slices is not None, False
        self._counts: list[_Count] = []  # of each microbatch of this step, looked ahead
        self._whole: _Count = 0.0  # their sum
        self._found: list[tuple[_Count, _Count]] = []  # of those that have run, what the count is, and was ahead
        self._unlike: Callable[[], bool] | None = None  # whether these differ somewhere
        self._uneven: Callable[[], bool] | None = None
        self._asks, self._answers = True, set[Answer]()  # whether a loss that is one number is the mean over rows
        self._before: Rows | None = None  # those of the microbatch before, if it has one
        self._numbers: list[float] | None = None  # those of the output that the loss of a microbatch used
        self._steps = 0  # that were asked about these

    def __call__(self, loss_fn: LossFn, output: Any, microbatch: Microbatch) -> Tensor:
        """This microbatch's part of the loss of the batch."""
        loss = loss_fn(output, microbatch.target)
        if isinstance(loss, tuple) and len(loss) == 2:
            total, count = not_half(_one_number(loss[0])), loss[1]
            self._ask_positions(loss_fn, output, microbatch, is_counted=True)
            self._note(loss_fn, output, microbatch, _number(count, total.device), total.device)
            part = _divided(total, self._whole)
        else:
            if microbatch.weight < 1 and torch.is_grad_enabled():
                self._ask(loss_fn, output, microbatch)
            self._ask_positions(loss_fn, output, microbatch, is_counted=False)
            total, self._uneven = _one_number(loss), microbatch.uneven
            if self._slices is not None:
                self._share(False, labels_in(microbatch.targets or [microbatch.target]), total.device)
            part = not_half(total) * microbatch.weight
        if _later.is_here(total):
            self.check()
        return part

    def _ask(self, loss_fn: LossFn, output: Any, microbatch: Microbatch) -> None:
        """Raise if the loss is not the mean over rows, as far as that can be seen in the first step that has rows."""
        if self._steps < _STEPS:
            used = numbers_used(_aside(loss_fn), output, microbatch.target)
            check_numbers(self._numbers, used)
            self._numbers = used
        if not self._asks:
            return
        rows = Rows(output, microbatch.target, microbatch.dim, microbatch.rows)
        before, self._before = self._before, None
        if rows.count == 1:
            self._before = rows
            rows = rows if before is None else before.joined(rows)
        if rows.count > 1:
            self._answers.add(check_mean(_aside(loss_fn), rows))
        elif before is not None:
            self._answers.add("never")

    def _ask_positions(self, loss_fn: LossFn, output: Any, microbatch: Microbatch, *, is_counted: bool) -> None:
        """Raise if the losses of slices do not add up to that of the sequence, as far as seen in the first step."""
        dim = 1 - microbatch.dim  # positions are beside the rows
        if self._asks_positions and dim >= 0 and torch.is_grad_enabled():
            self._asked_positions = True
            positions = Rows(output, microbatch.target, dim, 0)
            if positions.count > 1:
                check_positions(_aside(loss_fn), positions, dim, is_counted)

    def _share(self, is_counted: bool, count: _Count, device: torch.device) -> None:
        """Tell the processes with the other slices what the loss counts here, once in a step."""
        if self._slices is not None and self._shared is None:
            self._shared = SliceCounts(self._slices, is_counted, count, device)

    def _note(self, loss_fn: LossFn, output: Any, microbatch: Microbatch, count: _Count, device: torch.device) -> None:
        """Count the targets of all microbatches, if this is the first of a step, and note what this one's count is."""
        targets = microbatch.targets or [microbatch.target]  # a sample has no others
        if not self._counts:
            there = count.device if isinstance(count, Tensor) else None
            self._counts = [_number(_count(loss_fn, output, target), there) for target in targets]
            total = sum(self._counts)
            self._share(True, total, device)
            self._whole = _some(total if self._shared is None else self._shared.mean)
            if self._copies is not None and torch.is_grad_enabled():
                own, self._whole = self._whole, _some(_mean(self._whole, self._copies, device))
                self._more = self._whole / own
        ahead = next(c for c, t in zip(self._counts, targets, strict=True) if t is microbatch.target)
        self._found.append((count, ahead))
        if len(self._found) == len(targets):
            self._unlike = _differ(self._found)

    def reported(self, part: Tensor) -> Tensor:
        """A microbatch's part of the loss of this process's own data, of which one of all data was made."""
        return part if self._more is None else (part * self._more).to(part.dtype)

    def check(self) -> None:
        """Raise if the losses do not add up to that of the batch: means of unequal parts, or counts that vary.

        On a GPU it waits for the beginning of the step, and for the last microbatch if it counts, while the rest of the
        step is waiting to run.
        """
        if self._shared is not None:
            self._shared.check()
        if self._uneven is not None and self._uneven():
            raise PipelineError(
                f"the targets that are not {IGNORED} are not spread evenly over the microbatches, so means of them do "
                "not add up to the mean of the batch",
                got="a loss_fn that returns one number",
                fix="return (sum, count): the sum of the losses, and how many targets it has",
            )
        if self._unlike is not None and self._unlike():
            count, ahead = next((float(c), float(a)) for c, a in self._found if not bool(c == a))
            raise PipelineError(
                "the count that loss_fn returns must depend on the target alone",
                got=f"{count:g} for a microbatch, and {ahead:g} with another output",
                fix="count targets, or compute the mean over rows",
            )

    def clear(self) -> None:
        """The step is over."""
        self._counts, self._found, self._whole = [], [], 0.0
        self._uneven = self._unlike = self._shared = self._more = None
        self._asks_positions = self._asks_positions and not self._asked_positions
        self._steps = _STEPS if self._numbers == [] else self._steps + (self._numbers is not None)
        self._numbers = None
        if "never" in self._answers and "seen" not in self._answers:
            warnings.warn(
                "it could not be tried whether loss_fn is the mean over the rows, since it takes no fewer rows than a "
                "microbatch has; if it is not, gradients are not those of the batch: return (sum, count) to say how it "
                "adds up",
                stacklevel=2,
            )
        self._asks, self._before = self._asks and not self._answers, None
        self._answers.clear()


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise PipelineError(
            "loss_fn must return one number", got=got, fix="reduce it, as by .mean(), or return (sum, count)"
        )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss  # a shard of it may be a term of a sum


def _number(count: Any, device: torch.device | None) -> _Count:
    """A count as a number; on this device as a tensor, which nobody waits for."""
    if isinstance(count, DTensor):
        count = count.full_tensor()
    if not isinstance(count, Tensor) or count.device != device:
        return float(count.detach() if isinstance(count, Tensor) else count)
    if count.numel() != 1:
        raise PipelineError(
            "the count that loss_fn returns must be one number",
            got=f"a tensor of shape {tuple(count.shape)}",
            fix="add them up: (sum, count.sum())",
        )
    return count.detach().reshape(()).double()


def _count(loss_fn: LossFn, output: Any, target: Any) -> Any:
    """The count of a target, with the output of another microbatch, of which as many rows are taken."""
    rows = next((len(leaf) for leaf in leaves(target) if isinstance(leaf, Tensor) and leaf.ndim), None)

    def some(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach() if rows is None or not leaf.ndim else leaf.detach()[:rows]

    with torch.no_grad():
        return _aside(loss_fn)(replace_leaves(some, output), target)[1]


def _some(count: _Count) -> _Count:
    """A count by which can be divided."""
    return count.clamp(min=_LEAST) if isinstance(count, Tensor) else max(count, _LEAST)


def _mean(count: _Count, copies: Collective, device: torch.device) -> Tensor:
    """The mean of a count over processes. Over NCCL the stream waits for them, and not the host."""
    total = torch.zeros((), dtype=torch.float64, device=device) + count
    copies.sum(total).wait()
    return total / copies.size


def _divided(total: Tensor, count: _Count) -> Tensor:
    if not isinstance(count, Tensor):
        return total / count
    return total / count.to(total.dtype if total.is_floating_point() else torch.get_default_dtype())


def _differ(pairs: Sequence[tuple[_Count, _Count]]) -> Callable[[], bool]:
    """Whether two counts of one pair differ: a function that waits for a GPU if they are there."""
    unlike = [one != other for one, other in pairs]
    tensors = [each for each in unlike if isinstance(each, Tensor)]
    on_device = _later.to_host(torch.stack(tensors).any().float()) if tensors else None
    plain = any(each for each in unlike if not isinstance(each, Tensor))
    return lambda: plain or (on_device is not None and on_device()[0][0] > 0)


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
    wait = _later.to_host((spread != spread[0]).any().float())
    return lambda: wait()[0][0] > 0


def labels_in(targets: list[Any]) -> Tensor | float:
    """How many integers among the targets are not -100."""
    labels = [leaf for target in targets for leaf in leaves(target) if _is_labels(leaf)]
    return torch.stack([(each != IGNORED).sum() for each in labels]).sum().double() if labels else 0.0


def _is_labels(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.long and bool(leaf.numel())


def check_rows(output: Any, microbatch: Microbatch) -> None:
    """Raise if the target has other rows than the inputs and than the output: a loss would stretch the smaller one."""
    target, dim = microbatch.target, microbatch.dim
    rows = target.shape[dim] if isinstance(target, Tensor) and target.ndim > dim else None
    made = {t.shape[dim] for t in leaves(output) if isinstance(t, Tensor) and t.ndim > dim}
    if rows is not None and microbatch.rows and rows != microbatch.rows and rows not in made:
        raise PipelineError(
            "the target must have as many rows as the batch",
            got=f"{rows} rows of the target for {microbatch.rows} rows of the batch, in one microbatch",
            fix="pass the target of the same batch",
        )
