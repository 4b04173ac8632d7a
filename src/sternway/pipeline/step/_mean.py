"""Is a loss the mean over its rows?

Only then is the loss of the batch what the losses of its microbatches add up to. A sum, a mean over what a mask leaves,
and one with weights of classes are not, and gradients would be wrong without notice. So in the first step the loss of
two rows is compared with those of each of them. In later steps it is not: on a GPU the host would wait for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


def check_mean(call: Callable[[Any, Any], Any], output: Any, target: Any, dim: int) -> bool:
    """Raise if a loss is not the mean over rows; returns whether that could be seen.

    Args:
        call: the loss, which leaves nothing changed.
        output: of a microbatch that ``has_rows``.
        target: of the same.
        dim: where the rows are.
    """
    cut = [leaf for leaf in leaves([output, target]) if isinstance(leaf, Tensor) and leaf.ndim > dim]
    if any(not t.is_floating_point() and bool((t.narrow(dim, 0, 2) == IGNORED).any()) for t in cut):
        return False  # means over other labels have a check of their own

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

    try:
        # A compiled loss would be compiled for these few rows, too.
        with torch.no_grad(), _alone(), uncompiled(), python_unchanged(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both, again, first, second = loss_of(0, 2), loss_of(0, 2), loss_of(0, 1), loss_of(1, 1)
    except _TalksError:
        return True  # not asked again: other processes may have other rows, and not ask at all
    except Exception:  # a loss may not be made for so few rows
        return False
    if both != again or not all(map(math.isfinite, (both, first, second))):
        return False  # it draws random numbers, or a row has no loss
    size = max(abs(both), abs(first), abs(second))  # the two may nearly cancel
    if abs(both - (first + second) / 2) > (0.05 if half else 1e-3) * size + 1e-6:
        raise PipelineError(
            "loss_fn must return the mean over the rows: only then microbatches add up to the batch",
            got=f"{both:g} for two rows, and {first:g} and {second:g} for each of them",
            fix=_FIX,
        )
    return True
