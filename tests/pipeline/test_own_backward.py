"""Forwards that run a backward of their own, for forces or energies: in one stage as ever, through a cut refused.

The sample's run saved nothing for a backward, so that each such model failed with a TypeError of torch.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM = 4
X, TARGET = torch.linspace(-1, 1, 4 * DIM).view(4, DIM), torch.linspace(1, 3, 4 * DIM).view(4, DIM)


class Downhill(nn.Module):
    """A step down an energy: a module that differentiates what it computes itself."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.energy, self.by_func = nn.Linear(DIM, 1), by_func

    def forward(self, x: Tensor) -> Tensor:
        def energy(y: Tensor) -> Tensor:
            return self.energy(y).tanh().sum()

        if self.by_func:
            return x - torch.func.grad(energy)(x)
        y = x.detach().requires_grad_()
        return x - torch.autograd.grad(energy(y), y, create_graph=True)[0]


def pipe_of(model: nn.Module) -> Pipeline:
    options: dict[str, Any] = {"schedule": "zb-h1", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    return Pipeline(model, transport=LocalTransport(), **options)


@pytest.mark.parametrize("by_func", [False, True])
def test_a_module_that_does_all_of_it(by_func: bool) -> None:
    model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(DIM, DIM), Downhill(by_func))))
    reference = copy.deepcopy(model)
    pipe_of(model).step(X, target=TARGET)
    F.mse_loss(reference(X), TARGET).backward()
    assert_same_grads(model, reference)


class Head(nn.Linear):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return torch.autograd.grad(super().forward(x * places).sum(), places, create_graph=True)[0]


class Forces(nn.Module):
    """The energy depends on the places in every layer, and in the head once more."""

    def __init__(self, in_module: bool) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)), Head(DIM, DIM)
        self.in_module = in_module

    def forward(self, x: Tensor) -> Tensor:
        y = places = x.detach().requires_grad_()
        for layer in self.layers:
            y = layer(y + places).tanh()
        if self.in_module:
            return self.head(y, places)
        return torch.autograd.grad((y * places).sum(), places, create_graph=True)[0]


@pytest.mark.parametrize("in_module", [False, True])
def test_a_backward_through_a_cut_is_refused(in_module: bool) -> None:
    with pytest.raises(PipelineError, match=r"runs a backward of its own, and one stage must have.*autograd\.grad"):
        pipe_of(Forces(in_module)).step(X, target=TARGET)
