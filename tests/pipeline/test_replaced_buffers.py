"""Forwards that put another tensor in the place of a buffer, as ``self.mean = 0.9 * self.mean + …`` does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.forward._untouched import untouched


class Fading(nn.Module):
    """Multiplies by a buffer, which becomes another, and by an attribute that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x) * self.factor / self.calls
        self.factor = self.factor * 0.5
        return y


class Between(nn.Module):
    """Does so in code between its modules, which every stage runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.factor = self.factor * 0.5
        return self.second(self.first(x) * self.factor)


def build(model: nn.Module, sample: Tensor | None) -> Pipeline:
    return Pipeline(
        model, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, ranks=2, sample=sample, sample_target=sample,
        transport=LocalTransport(),
    )  # fmt: skip


@pytest.mark.parametrize("with_sample", [True, False])
def test_a_module_that_replaces_its_buffer(with_sample: bool) -> None:
    """With a sample its runs remained in the buffer, and gradients were wrong; without one, the first step failed."""
    model, x = nn.Sequential(Fading(), Fading()), torch.randn(4, 4)
    alone = copy.deepcopy(model)
    pipe = build(model, x[:2] if with_sample else None)
    pipe.step(x, target=x)
    for rows in x.chunk(2):
        (F.mse_loss(alone(rows), rows) / 2).backward()
    assert_same_grads(model, alone)
    for mine, expected in zip(model, alone, strict=True):
        assert torch.equal(mine.factor, expected.factor)
        assert mine.calls == expected.calls == 2


@pytest.mark.parametrize("with_sample", [True, False])
def test_code_between_modules_cannot_replace_a_buffer(with_sample: bool) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(PipelineError, match=r"code between the modules changes the buffer factor.*forward of Between"):
        build(Between(), x[:2] if with_sample else None).step(x, target=x)


class Borrowing(nn.Module):
    """Code of the last stage uses a buffer of a module of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_buffer("factor", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.first.factor


def test_the_state_has_a_buffer_that_is_replaced_between_steps() -> None:
    """``state_dict`` had the one that the last stage was cut with."""
    model, x = Borrowing(), torch.randn(4, 4)
    pipe = build(model, x[:2])
    model.first.factor = torch.full((4,), 2.0)
    pipe.step(x, target=x)
    assert pipe.state_dict()["first.factor"].tolist() == [2.0] * 4


class Remembering(nn.Module):
    """Changes tensors that it has as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.total, self.last, self.frozen = nn.Linear(4, 4), torch.zeros(4), None, _frozen()

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        self.last = (x,)
        return self.linear(x) * self.frozen


def _frozen() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def test_plain_attributes_are_as_before_the_sample() -> None:
    module = Remembering()
    with untouched(module), torch.no_grad():
        module(torch.ones(2, 4))
    assert module.total.tolist() == [0.0] * 4
    assert module.last is None


def test_buffers_that_other_ranks_keep_have_no_values_to_put_back() -> None:
    """What another rank keeps is on the meta device, beside stages that are tried again to weigh a model's own loss."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).to("meta"))
    with untouched(module), torch.no_grad():
        module[0](torch.randn(3, 4))
    assert module[0].num_batches_tracked == 0
    assert module[1].running_mean.is_meta
