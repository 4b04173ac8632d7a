"""How much of a model's weight-gradient work the split leaves to W, in floating-point operations.

    plain      what an ordinary backward computes
    inputs     what the gradients of the inputs alone take: no split can put less into I
    share      of the difference, the part that W computes

A model of small own layers (``tests/split``) and one of a library (``tests/zoo``) are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from flops import flops
from torch import Tensor

from sternway import graph, split

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
