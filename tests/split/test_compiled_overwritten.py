"""Compiled modules that overwrite a tensor after its use, as those that follow running statistics do.

torch's partitioner saves the tensor and computes from it again in the backward, where it has been overwritten. So the
gradients of backend="inductor" are wrong in torch 2.13; those of ours must not be.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_grads
from sternway import split

DIM = 4


class Following(nn.Module):
    """Divides by a running mean of squares, multiplies by a copy of it, and then follows it; changes its input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("squares", torch.full((DIM,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.exp())
        z = y / (self.squares + 1e-5).sqrt() + y * self.squares.view(2, 2).t().reshape(-1).clone()
        with torch.no_grad():
            self.squares.mul_(0.5).add_(y.square().mean(0), alpha=0.5)
        x.add_(1)
        return z


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_backward_finds_what_was_there(inner: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Following()
    alone = copy.deepcopy(model)
    compiled = torch.compile(model, backend="sternway", options={"inner": inner})
    for _ in range(2):
        batches = [torch.randn(3, DIM) for _ in range(2)]
        losses = [compiled(x.clone()).square().mean() for x in batches]  # both in flight
        for loss in losses:
            split.backward_input(loss)[1].run()
        for x in batches:
            alone(x).square().mean().backward()
    assert_same_grads(model, alone)
    torch.testing.assert_close(model.squares, alone.squares)
