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
from sternway.pipeline.forward._own_loss import IGNORED
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


def has_rows(output: Any, target: Any, dim: int) -> bool:
    """Whether all tensors have the same rows, and at least two of them."""
    tensors = [leaf for leaf in leaves([output, target]) if isinstance(leaf, Tensor)]
    rows = {tensor.shape[dim] for tensor in tensors if tensor.ndim > dim}
    if any(0 < tensor.ndim <= dim or isinstance(tensor, DTensor) for tensor in tensors):
        return False
    return len(rows) == 1 and rows.pop() >= 2


def check_positions(call: Callable[[Any, Any], Any], output: Any, target: Any, dim: int, is_counted: bool) -> None:
    """Raise if the losses of slices of sequences do not add up to that of the whole, as far as that can be seen.

    Args:
        call: the loss, which leaves nothing changed.
        output: of a microbatch that ``has_rows`` along ``dim``.
        target: of the same.
        dim: where the positions are.
        is_counted: whether the loss is a sum and a count.
    """
    if not is_counted:
        check_mean(call, output, target, dim, _POSITIONS)
        return

    def for_each_position(which: int) -> Callable[[Any, Any], Any]:
        def found(output: Any, target: Any) -> Any:
            count = next(t.shape[dim] for t in leaves([output, target]) if isinstance(t, Tensor) and t.ndim > dim)
            return torch.as_tensor(call(output, target)[which], dtype=torch.float64) / count

        return found

    for which in (0, 1):
        check_mean(for_each_position(which), output, target, dim, _ADDED)


def check_mean(call: Callable[[Any, Any], Any], output: Any, target: Any, dim: int, words: _Rule = _ROWS) -> Answer:
    """Raise if a loss is not the mean over rows; returns whether that could be seen.

    Args:
        call: the loss, which leaves nothing changed.
        output: of a microbatch that ``has_rows``.
        target: of the same.
        dim: where the rows are.
        words: what is asked, if not about rows.
    """
    cut = [leaf for leaf in leaves([output, target]) if isinstance(leaf, Tensor) and leaf.ndim > dim]
    labels = [] if words.takes_ignored else [t for t in cut if not t.is_floating_point()]
    if any(bool((t.narrow(dim, 0, 2) == IGNORED).any()) for t in labels):
        return "not now"  # means over other labels have a check of their own

    rows = min(tensor.shape[dim] for tensor in cut)
    coarse = any(t.is_cuda for t in cut)  # TF32, which depends on the number of rows
    half = any((t.is_floating_point() and t.itemsize < 4) or torch.is_autocast_enabled(t.device.type) for t in cut)

    def loss_of(first: int, count: int) -> float:
        nonlocal half

        def some(leaf: Any) -> Any:
            return leaf.detach().narrow(dim, first, count) if isinstance(leaf, Tensor) and leaf.ndim > dim else leaf

        found = call(replace_leaves(some, output), replace_leaves(some, target))
        if not isinstance(found, Tensor) or found.numel() != 1:
            return math.nan
        half |= found.itemsize < 4  # it may have gone over to half precision by itself
        return float(found.detach())

    # A compiled loss would be compiled for these few rows, too.
    with torch.no_grad(), _alone(), uncompiled(), python_unchanged(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in (1, 2):  # a loss may not be made for one row, as a variance is not
            if 2 * part > rows:
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
        else:
            return "never"
    size = max(abs(both), abs(first), abs(second))  # the two may nearly cancel
    if abs(both - (first + second) / 2) > (0.05 if half else 1e-3 if coarse else 5e-5) * size + 1e-6:
        many = f"{ {1: 'two', 2: 'four'}[part] } {words.name}"
        raise PipelineError(
            words.rule,
            got=f"{both:g} for {many}, and {first:g} and {second:g} for each {'of them' if part == 1 else 'half'}",
            fix=words.fix,
        )
    return "seen"


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
