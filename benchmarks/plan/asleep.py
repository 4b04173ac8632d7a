"""Blocks that sleep instead of computing: what is measured then is the plan and what runs it, not the machine.

Real processes, messages, autograd graphs and splits; but an F, I or W takes as long as it is told to, on any number of
ranks, however few cores there are.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Asleep(torch.autograd.Function):
    """Returns its input, after a while; and its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: float, back: float) -> Tensor:
        ctx.back = back
        time.sleep(there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.back)
        return grad, None, None


class AsleepBlock(nn.Module):
    """A residual linear layer whose F, I and W take so many seconds longer."""

    def __init__(self, dim: int, f: float, i: float, w: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.f, self.i, self.w = f, i, w

    def forward(self, x: Tensor) -> Tensor:
        weight = _Asleep.apply(self.linear.weight, 0.0, self.w)  # type: ignore[no-untyped-call]  # torch's
        found: Tensor = x + F.linear(_Asleep.apply(x, self.f, self.i), weight)  # type: ignore[no-untyped-call]
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
