"""Values, parameters and names that a model and its stages have: as ever, or refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from compare import assert_same_grads
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
    with pytest.raises(PipelineError, match=r"a parameter cannot be replaced.*got another scale of Scaled"):
        pipe.step(X, target=X)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), name
        setattr(self, name, nn.Parameter(torch.ones(DIM)) if name == "weight" else nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y, own = self.last(self.first(x)), getattr(self, self.name)
        return own(y) if isinstance(own, nn.Module) else y * own


@pytest.mark.parametrize("name", ["weight", "dead", "begun", "model", "attributes"])
def test_names_that_stages_had_for_themselves(name: str) -> None:
    """A parameter ``weight`` of the model itself was taken out of its stage, and was not trained."""
    model = Named(name)
    reference, pipe = copy.deepcopy(model), pipe_of(model)
    pipe.step(X, target=X)
    F.mse_loss(reference(X), X).backward()
    assert_same_grads(model, reference)
    assert {own for own, _ in pipe.named_parameters()} == {own for own, _ in model.named_parameters()}
    assert pipe.state_dict().keys() == model.state_dict().keys()


def test_names_that_they_still_have_are_refused() -> None:
    with pytest.raises(PipelineError, match="by a name that its stages need for themselves; got look_outside"):
        pipe_of(Named("look_outside"))
