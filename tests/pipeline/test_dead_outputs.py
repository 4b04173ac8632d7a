"""Values that are sent to another stage and lead to nothing: no gradient, as in one process, and no wait for a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.transport import _later

DIM = 6


class Aside(nn.Module):
    """The first stage makes a value that the second one takes, and may use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.extra = nn.Linear(DIM, DIM)
        self.factor: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        aside = self.extra(x)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        aside = aside.sin()
        return x if self.factor is None else x + self.factor * aside


def build(model: Aside) -> Pipeline:
    return Pipeline(
        model, schedule="zb-h1", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, cuts=["layers.2"],
        sample=torch.randn(2, DIM), transport=LocalTransport(),
    )  # fmt: skip


def steps(model: Aside, factors: list[float | None]) -> None:
    """Run steps that use the value with such factors, or not; each has the gradients of one process."""
    torch.manual_seed(0)
    plain, pipe = copy.deepcopy(model), build(model)
    for factor in factors:
        model.factor = plain.factor = factor
        x, target = torch.randn(4, DIM), torch.randn(4, DIM)
        model.zero_grad()
        plain.zero_grad()
        pipe.step(x, target=target)
        F.mse_loss(plain(x), target).backward()
        assert_same_grads(model, plain)


@pytest.fixture(params=[True, False], ids=["as on a CPU", "as on a GPU"])
def is_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a number can be read without a wait."""
    monkeypatch.setattr(_later, "is_here", lambda number: request.param)
    return bool(request.param)


def test_weights_that_lead_to_nothing_have_no_gradient(is_here: bool) -> None:
    model = Aside()
    steps(model, [None] * 4)
    assert model.extra.weight.grad is None


def test_a_value_that_is_used_since_the_first_step_has_one(is_here: bool) -> None:
    model = Aside()
    steps(model, [0.5, 0.25, 0.125])
    assert model.extra.weight.grad is not None


def test_a_value_that_is_used_later_has_one_or_is_refused(is_here: bool) -> None:
    if is_here:
        steps(Aside(), [None, None, 0.5, None])
    else:
        with pytest.raises(
            PipelineError, match=r"same values in every step.*a gradient of a value that led to nothing"
        ):
            steps(Aside(), [None, None, 0.5])
        steps(Aside(), [0.5, 0.0, 0.5])  # used in every step


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.extra = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, aside: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.main(x), self.extra(x) if aside is None else aside


class Last(nn.Linear):
    factor: float | None = None

    def forward(self, x: Tensor, aside: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.factor is None else y + self.factor * aside


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_that_were_passed_one_by_one(name: str) -> None:
    """The weights of what the last stage leaves got zeros, by which AdamW makes them smaller."""
    torch.manual_seed(0)
    stages = {0: Two(), 1: Two(), 2: Last(DIM, DIM)}
    stages[1].extra.requires_grad_(False)  # passes on what it received
    modules = nn.ModuleList(stages.values())
    plain = copy.deepcopy(modules)
    pipe = Pipeline(
        stages, schedule=name, n_microbatches=2, ranks=3, loss_fn=F.mse_loss, transport=LocalTransport()
    )  # fmt: skip
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    for factor in (None, 0.5, None, 0.0):  # of 0.0 come zeros, in one process too
        stages[2].factor = plain[2].factor = factor
        modules.zero_grad()
        plain.zero_grad()
        pipe.step(x, target=target)
        F.mse_loss(plain[2](*plain[1](*plain[0](x))), target).backward()
        assert_same_grads(modules, plain)
