"""Blocks that sleep instead of computing: what is measured then is the plan and what runs it, not the machine.

Real processes, messages, autograd graphs and splits; but an F, I or W takes as long as it is told to, on any number of
ranks, however few cores there are. With a spread, each differs from the others at random.
"""

from __future__ import annotations

import math
import os
import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_RANDOM = random.Random(int(os.environ.get("RANK", "0")))  # a stream of its own, which no seeds of the step touch


def _sleep(seconds: float, spread: float) -> None:
    """Sleep for so long on average; ``spread`` is the standard deviation, as a share of it."""
    sigma = math.sqrt(math.log1p(spread**2))
    time.sleep(seconds * _RANDOM.lognormvariate(-(sigma**2) / 2, sigma))


class _Asleep(torch.autograd.Function):
    """Returns its input, after a while; and its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float, spread: float = 0.0) -> Tensor:
        ctx.back, ctx.spread = back, spread
        _sleep(there, spread)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        _sleep(ctx.back, ctx.spread)
        return grad, None, None, None


class AsleepBlock(nn.Module):
    """A residual linear layer whose F, I and W take so many seconds longer."""

    def __init__(self, dim: int, f: float, i: float, w: float, spread: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.f, self.i, self.w, self.spread = f, i, w, spread

    def forward(self, x: Tensor) -> Tensor:
        weight = _Asleep.apply(self.linear.weight, 0.0, self.w, self.spread)  # type: ignore[no-untyped-call]  # torch's
        x_late = _Asleep.apply(x, self.f, self.i, self.spread)  # type: ignore[no-untyped-call]
        found: Tensor = x + F.linear(x_late, weight)
        return found


class AsleepMLP(nn.Module):
    """An MLP that keeps eight times its input for the backward, and whose F, I and W take so many seconds longer."""

    def __init__(self, dim: int, f: float, i: float, w: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.f, self.i, self.w = f, i, w

    def forward(self, x: Tensor) -> Tensor:
        weight = _Asleep.apply(self.down.weight, 0.0, self.w)  # type: ignore[no-untyped-call]  # torch's
        inner = F.gelu(self.up(_Asleep.apply(x, self.f, self.i)))  # type: ignore[no-untyped-call]
        return x + F.linear(inner, weight)
