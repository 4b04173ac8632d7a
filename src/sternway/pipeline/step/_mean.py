"""Is a loss the mean over its rows?

Only then is the loss of the batch what the losses of its microbatches add up to. A sum, a mean over what a mask leaves,
and one with weights of classes are not, and gradients would be wrong without notice. So in the first step the loss of
two rows of each microbatch is compared with those of each of them. In later steps it is not: on a GPU the host would
wait for it.

Where sequences are cut into slices, a loss must be the mean over positions in the same way, or its sum and its count
must add up. One that shifts labels by itself does not: at the end of each slice it would leave one out.

A number that the model itself returns (a loss, or a term that balances experts) has no rows to take. If it is another
one for each microbatch, it was made from their rows, and nobody but the user can say how it adds up.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway._torch.modes import uncompiled
from sternway._torch.saved_hooks import intercept
from sternway._tree import leaves, replace_leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._own_loss import IGNORED, label_counts
from sternway.pipeline.forward._python_random import python_unchanged

_PROCESSES = {"c10d", "_c10d_functional", "c10d_functional", "symm_mem"}  # namespaces of operators
_FIX = (
    "return (sum, count): the sum over rows, and what the sums are divided by; if rows are to be compared with each "
    "other in each microbatch, (loss * rows, rows)"
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a loss must be, and the words of the error if it is not.

    Attributes:
        rule: what it must be.
        name: of what it is a mean over.
        fix: how to mend it.
        takes_ignored: whether labels that do not count make no difference.
    """

    rule: str
    name: str
    fix: str
    takes_ignored: bool = False


_ROWS = _Rule("loss_fn must return the mean over the rows: only then microbatches add up to the batch", "rows", _FIX)
_SHIFT = "shift labels before sequences are cut into slices, not in loss_fn"
_POSITIONS = _Rule(
    "loss_fn must return the mean over the positions: only then slices of a sequence add up to the whole",
    "positions",
    f"return (sum, count): the sum over positions, and how many there are; {_SHIFT}",
)
_ADDED = _Rule(
    "the sum and the count that loss_fn returns must add up over positions: only then slices of a sequence do",
    "positions",
    f"sum over positions, and count these; {_SHIFT}",
    takes_ignored=True,
)

Answer = Literal["seen", "not now", "never"]
"""Whether it could be seen that a loss is a mean: not with these rows, or not with any so few."""


class _TalksError(Exception):
    """A loss was about to talk to other processes."""


def _alone() -> AbstractContextManager[Any]:
    """A block in which an operation over processes raises, and is not begun."""
    if not (dist.is_available() and dist.is_initialized()):
        return nullcontext()

    def look(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = operator.name() if hasattr(operator, "name") else str(operator)
        if name.split("::")[0] in _PROCESSES:
            raise _TalksError(name)
        return operator(*args, **kwargs)

    return intercept(look)


class Rows:
    """The output of a microbatch and its target, of which rows can be taken.

    Of the target all tensors have rows; of the output, those that are as long as a tensor of the target, or as the
    microbatch. What else the model returns is the same for all rows.

    Args:
        output: of a microbatch.
        target: of the same.
        dim: where the rows are.
        rows: how many the inputs have; 0 if that is not known.

    Attributes:
        count: into how many equal parts it can be cut.
    """

    def __init__(self, output: Any, target: Any, dim: int, rows: int) -> None:
        self._output, self._target, self._dim, self._rows = output, target, dim, rows
        goals = [leaf for leaf in leaves(target) if _is_long(leaf, dim)]
        sizes = {goal.shape[dim] for goal in goals}
        made = [leaf for leaf in leaves(output) if _is_long(leaf, dim) and leaf.shape[dim] in sizes | {rows}]
        is_sharded = any(isinstance(leaf, DTensor) for leaf in leaves([output, target]))
        self.count = math.gcd(rows, *sizes) if goals and made and not is_sharded else 0
        self.tensors: list[Tensor] = [*made, *goals] if self.count else []
        self._integers = [goal for goal in goals if not goal.is_floating_point()]

    def take(self, first: int, count: int) -> tuple[Any, Any]:
        """Output and target of ``count`` parts from the ``first`` on."""
        cut = {id(tensor): self._part(tensor, first, count) for tensor in self.tensors}
        output, target = (
            replace_leaves(lambda leaf: cut.get(id(leaf), leaf), each) for each in (self._output, self._target)
        )
        return output, target

    def _part(self, tensor: Tensor, first: int, count: int) -> Tensor:
        each = tensor.shape[self._dim] // self.count
        return tensor.detach().narrow(self._dim, first * each, count * each)

    def labels(self, first: int, count: int) -> Tensor | None:
        """The labels of these parts, if some are ignored."""
        labels = next((each for each in self._integers if bool((each == IGNORED).any())), None)
        return None if labels is None else self._part(labels, first, count).movedim(self._dim, 0)

    def joined(self, other: Rows) -> Rows:
        """The rows of both, if they are alike; else none."""
        pairs = dict(zip(map(id, self.tensors), other.tensors, strict=False))
        dim = self._dim
        if len(self.tensors) != len(other.tensors) or any(
            one.shape != pairs[id(one)].shape or one.dtype != pairs[id(one)].dtype for one in self.tensors
        ):
            return Rows((), (), dim, 0)
        both = {id(one): torch.cat([one.detach(), pairs[id(one)].detach()], dim) for one in self.tensors}
        output, target = (
            replace_leaves(lambda leaf: both.get(id(leaf), leaf), each) for each in (self._output, self._target)
        )
        return Rows(output, target, dim, 2 * self._rows)


def _is_long(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.layout is torch.strided and leaf.ndim > dim


def check_positions(call: Callable[[Any, Any], Any], rows: Rows, dim: int, is_counted: bool) -> None:
    """Raise if the losses of slices of sequences do not add up to that of the whole, as far as that can be seen.

    Args:
        call: the loss, which leaves nothing changed.
        rows: at least two positions, which are along ``dim``.
        dim: where the positions are.
        is_counted: whether the loss is a sum and a count.
    """
    if not is_counted:
        check_mean(call, rows, _POSITIONS)
        return

    def for_each_position(which: int) -> Callable[[Any, Any], Any]:
        def found(output: Any, target: Any) -> Any:
            count = next(leaf.shape[dim] for leaf in leaves(target) if _is_long(leaf, dim))
            return torch.as_tensor(call(output, target)[which], dtype=torch.float64) / count

        return found

    for which in (0, 1):
        check_mean(for_each_position(which), rows, _ADDED)


def check_mean(call: Callable[[Any, Any], Any], rows: Rows, words: _Rule = _ROWS) -> Answer:
    """Raise if a loss is not the mean over rows; returns whether that could be seen.

    A mean over the labels that are not ignored may pass: whether these are spread evenly is looked at in every step.

    Args:
        call: the loss, which leaves nothing changed.
        rows: at least two.
        words: what is asked, if not about rows.
    """
    coarse = any(t.is_cuda for t in rows.tensors)  # TF32, which depends on the number of rows
    half = any(
        (t.is_floating_point() and t.itemsize < 4) or torch.is_autocast_enabled(t.device.type) for t in rows.tensors
    )

    def loss_of(first: int, count: int) -> float:
        nonlocal half
        found = call(*rows.take(first, count))
        if not isinstance(found, Tensor) or found.numel() != 1:
            return math.nan
        half |= found.itemsize < 4  # it may have gone over to half precision by itself
        return float(found.detach())

    # A compiled loss would be compiled for these few rows, too.
    with torch.no_grad(), _alone(), uncompiled(), python_unchanged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (1, 2):  # a loss may not be made for one row, as a variance is not
            if 2 * part > rows.count:
                return "never"
            try:
                both, again = loss_of(0, 2 * part), loss_of(0, 2 * part)
                first, second = loss_of(0, part), loss_of(part, part)
            except _TalksError:
                return "seen"  # not asked again: other processes may have other rows, and not ask at all
            except Exception:
                continue
            if both != again or not math.isfinite(both):
                return "not now"  # it draws random numbers, or training has gone wrong
            if math.isfinite(first) and math.isfinite(second):
                break
            if rows.labels(0, 1) is not None:
                return "not now"  # a row has none that count
        else:
            return "never"
    size = max(abs(both), abs(first), abs(second))  # the two may nearly cancel
    error = min(abs(both - (first + one * (second - first))) for one in _shares(rows, part, words))
    if error > (0.05 if half else 1e-3 if coarse else 5e-5) * size + 1e-6:
        many = f"{ {1: 'two', 2: 'four'}[part] } {words.name}"
        raise PipelineError(
            words.rule,
            got=f"{both:g} for {many}, and {first:g} and {second:g} for each {'of them' if part == 1 else 'half'}",
            fix=words.fix,
        )
    return "seen"


def _shares(rows: Rows, part: int, words: _Rule) -> list[float]:
    """What the second part of two may count in a mean: as much as the first, or by its labels."""
    one, other = rows.labels(0, part), rows.labels(part, part)
    if one is None or other is None or words.takes_ignored:
        return [0.5]
    if words is _POSITIONS:  # none of which is shifted
        one, other = one.flatten(), other.flatten()
    counts = zip(label_counts(one).tolist(), label_counts(other).tolist(), strict=True)
    return [second / (first + second) for first, second in counts if first + second]


def numbers_used(call: Callable[[Any, Any], Any], output: Any, target: Any) -> list[float]:
    """The numbers of an output that a loss depends on; ``call`` leaves nothing changed."""

    def is_number(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and not leaf.ndim and leaf.is_floating_point() and type(leaf) is Tensor

    numbers = [leaf for leaf in leaves(output) if is_number(leaf)]
    found: list[float] = []
    try:
        with torch.no_grad(), _alone(), uncompiled(), python_unchanged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in numbers:
                same, other = (call(_with_more(output, number, more), target) for more in (0.0, 1.0))
                if isinstance(same, Tensor) and isinstance(other, Tensor) and not torch.equal(same, other):
                    found.append(float(number))
    except Exception:  # one that talks to other processes, say
        return []
    return found


def _with_more(output: Any, number: Tensor, more: float) -> Any:
    return replace_leaves(lambda leaf: leaf + more if leaf is number else leaf, output)


def check_numbers(before: list[float] | None, now: list[float]) -> None:
    """Raise if the numbers of two microbatches differ: then the model made them from rows."""
    if before is not None and before != now:
        raise PipelineError(
            "loss_fn uses a number that the model computes from the rows of a microbatch, of which it is not known how "
            "it adds up over the batch",
            got=f"{before} for one microbatch, {now} for another",
            fix="let the model return values with rows, and reduce them in loss_fn; or return (loss * rows, rows), "
            "with rows = len(target), if the mean over microbatches is meant",
        )
