"""Values and parameters that outlive a forward: what cannot be is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM = 4
X = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)


def pipe_of(model: nn.Module) -> Pipeline:
    options: dict[str, Any] = {"schedule": "zb-h1", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    return Pipeline(model, transport=LocalTransport(), **options)


class Caching(nn.Linear):
    made: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.weight.tanh()
        return x @ self.made


def test_a_weight_that_is_made_once_for_all_microbatches() -> None:
    with pytest.raises(PipelineError, match=r"a second time.*Fix: make every value in the forward of its microbatch"):
        pipe_of(nn.Sequential(Caching(DIM, DIM), Caching(DIM, DIM))).step(X, target=X)


def test_a_cache_that_the_first_look_has_filled() -> None:
    """It was a TypeError about hooks of torch."""
    normed = parametrizations.weight_norm
    model = nn.Sequential(*(nn.Sequential(nn.Tanh(), normed(nn.Linear(DIM, DIM))) for _ in range(4)))
    with (
        parametrize.cached(),
        pytest.raises(PipelineError, match=r"the run of the sample had made.*parametrize\.cached"),
    ):
        pipe_of(model).step(X, target=X)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * self.scale


@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_is_replaced(steps: int) -> None:
    """Before the first step it was a KeyError; after it, ``pipe.parameters()`` had the old one."""
    pipe = pipe_of(model := Scaled())
    for _ in range(steps):
        pipe.step(X, target=X)
    model.scale = nn.Parameter(torch.ones(DIM))
    with pytest.raises(PipelineError, match=r"a parameter cannot be replaced.*got another scale"):
        pipe.step(X, target=X)
