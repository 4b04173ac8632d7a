"""How much of a model's weight-gradient work the split leaves to W, in floating-point operations.

    plain      what an ordinary backward computes
    inputs     what the gradients of the inputs alone take: no split can put less into I
    share      of the difference, the part that W computes

A model of small own layers (``tests/split``) and one of a library (``tests/zoo``) are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from sternway import graph, split
from sternway._torch.saved_hooks import intercept

Step = Callable[[], tuple[Tensor, Sequence[Tensor]]]
"""Runs a forward; gives its output and the inputs whose gradients are wanted."""


@dataclass(frozen=True, slots=True)
class Deferral:
    """Operations of a backward and of its two halves, and bytes that are held."""

    plain: int
    inputs: int
    i: int
    w: int
    held_after_f: int
    held_after_i: int

    @property
    def share(self) -> float:
        """The share of the weight gradients' operations that W computes; 1 where they take none."""
        return self.w / (self.plain - self.inputs) if self.plain > self.inputs else 1.0

    @property
    def extra(self) -> int:
        """Operations that the two halves do beyond those of an ordinary backward."""
        return self.i + self.w - self.plain


def measure(step: Step) -> Deferral:
    """Run ``step`` three times: for an ordinary backward, for its inputs alone, and split. Changes ``.grad``.

    Example:
        >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        >>> measure(lambda: (layer(x), [x])).share
        1.0
    """
    output, _ = step()
    grad = torch.ones_like(output)
    plain = flops(lambda: torch.autograd.backward(output, grad))
    output, inputs = step()
    alone = flops(lambda: torch.autograd.grad(output, list(inputs), grad, allow_unused=True)) if inputs else 0
    output, inputs = step()
    held_after_f = graph.capture(output).saved_bytes
    pending: list[split.Pending] = []
    i = flops(lambda: pending.append(split.backward_input(output, grad, inputs)[1]))
    held_after_i = pending[0].nbytes
    return Deferral(plain, alone, i, flops(pending[0].run), held_after_f, held_after_i)


def flops(run: Callable[[], object]) -> int:
    """The floating-point operations of matrix products and convolutions in ``run``.

    torch's own counter puts hooks on modules, which a checkpoint that recomputes them does not stand.
    """
    total = 0

    def count(operator: Any, args: Any, kwargs: Any) -> Any:
        nonlocal total
        result = operator(*args, **kwargs)
        formula = _FORMULAS.get(operator._overloadpacket)
        if formula is not None:
            total += formula(*args, **kwargs, out_val=result)
        return result

    with intercept(count):
        run()
    return total


def _grouped_mm(left: Any, right: Any, *_: Any, **__: Any) -> int:
    stacks = left[0] if len(left) == len(right) == 3 else 1  # otherwise the groups divide a dimension of a matrix
    return 2 * stacks * prod(left[-2:]) * right[-1]


def _trilinear(first: Any, second: Any, third: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(max(sizes) for sizes in zip(*_expanded(first, second, third, _[:3]), strict=True))


def _expanded(*arguments: Any) -> list[list[int]]:
    *shapes, expands = arguments
    found = []
    for shape, expand in zip(shapes, expands, strict=True):
        sizes = list(shape)
        for dim in expand:
            sizes.insert(dim, 1)
        found.append(sizes)
    return found


_FORMULAS = {  # torch's, and those that it lacks
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
    torch.ops.aten._grouped_mm: shape_wrapper(_grouped_mm),
    torch.ops.aten._trilinear: shape_wrapper(_trilinear),
}
