"""Values, parameters and names that a model and its stages have: as ever, or refused in words."""

from __future__ import annotations

import copy
import pickle
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


def another(model: nn.Sequential) -> None:
    model[1] = nn.Linear(DIM, DIM)


def longer(model: nn.Sequential) -> None:
    model.append(nn.Linear(DIM, DIM))


def normed(model: nn.Sequential) -> None:
    model[3] = parametrizations.weight_norm(nn.Linear(DIM, DIM))


@pytest.mark.parametrize("change", [another, longer, normed])
def test_a_module_that_is_put_in_between_steps(change: Any) -> None:
    """A new module in the last stage was trained by nobody: ``pipe.parameters()`` did not have its own."""
    pipe = pipe_of(model := nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))))
    pipe.step(X, target=X)
    change(model)
    with pytest.raises(PipelineError, match=r"a parameter that the model did not have when it was cut, and no stage"):
        pipe.step(X, target=X)


def test_a_module_that_is_put_inside_of_a_piece_between_steps() -> None:
    pipe = pipe_of(model := nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4))))
    pipe.step(X, target=X)
    model[3][0] = nn.Sequential(nn.Linear(DIM, 2), nn.Linear(2, DIM))
    reference = copy.deepcopy(model)
    model.zero_grad()
    reference.zero_grad()
    pipe.step(X, target=X)
    F.mse_loss(reference(X), X).backward()
    assert_same_grads(model, reference)
    assert {id(each) for each in pipe.parameters()} == {id(each) for each in model.parameters()}


class Hastened(nn.Linear):
    """From its second call on, it is another function."""

    def forward(self, x: Tensor) -> Tensor:
        self.forward = self.faster
        return super().forward(x)

    def faster(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_piece_that_replaces_its_own_forward() -> None:
    """Each call was the first one."""
    model = nn.Sequential(Hastened(DIM, DIM), nn.Linear(DIM, DIM))
    with pytest.raises(PipelineError, match=r"must not replace its own forward while it runs; got 0 has another"):
        pipe_of(model).step(X, target=X)


class Times:
    """A forward that is equal to every other."""

    def __init__(self, module: nn.Linear, factor: float) -> None:
        self.module, self.factor = module, factor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.module.weight, self.module.bias) * self.factor

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_a_forward_that_is_replaced_between_steps() -> None:
    """One that is equal to the one before was not called."""
    pipe = pipe_of(model := nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)))
    for factor in (1.0, 3.0):
        model[0].forward = Times(model[0], factor)
        loss = pipe.step(X, target=X).loss
        torch.testing.assert_close(loss, F.mse_loss(model(X), X).detach())


def test_copies_of_stages_are_stages() -> None:
    """A copy called the pieces of what it was copied from: an ``IndexError``; and a stage could not be pickled."""
    pipe = pipe_of(model := Scaled())
    pipe.step(X, target=X)
    stages = {index: stage.module for index, stage in pipe.stages.items()}
    model.zero_grad()
    reference = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(stages))[1].state_dict().keys() == stages[1].state_dict().keys()
    options: dict[str, Any] = {"schedule": "zb-h1", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    copied = Pipeline(copy.deepcopy(stages), transport=LocalTransport(), **options)
    copied.step(X, target=X)
    F.mse_loss(reference(X), X).backward()
    theirs = dict(reference.named_parameters())
    for _, each in copied.stages.items():
        for name, parameter in each.module.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
    assert all(parameter.grad is None for parameter in model.parameters())


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
