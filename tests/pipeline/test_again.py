"""Stages that are recomputed, of modules whose forward changes something: they must find it as it was."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway import schedule
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline, fit
from sternway.pipeline.step._again import RecomputedForward

DIM, ROWS = 6, 8


class Fading(nn.Module):
    """Multiplies by a buffer that each call changes, in place or by another tensor, and counts."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(DIM, DIM), in_place
        self.register_buffer("factor", torch.ones(DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(DIM))  # which stays

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x).tanh() * self.factor.clone() * self.mask
        if self.in_place:
            self.factor.mul_(0.5)
        else:
            self.factor = self.factor * 0.5
        return y


def followed() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.InstanceNorm1d(3, track_running_stats=True), nn.Tanh())


@pytest.mark.parametrize("kind", ["in place", "another", "followed"])
@pytest.mark.parametrize("whole", [True, False])
def test_buffers_change_once(kind: str, whole: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[followed() if kind == "followed" else Fading(kind == "in place") for _ in range(4)])
    alone, x = copy.deepcopy(model), torch.randn(ROWS, 3, DIM)
    plan = replace(schedule.make("zb-h1", ranks=2, microbatches=4), recompute=(0, 1))
    pipe = Pipeline(
        model if whole else {0: model[:2], 1: model[2:]}, schedule=plan, loss_fn=F.mse_loss, ranks=2,
        transport=LocalTransport(),
    )  # fmt: skip
    for _ in range(2):
        pipe.step(x, target=x)
        for rows in x.chunk(4):
            (F.mse_loss(alone(rows), rows) / 4).backward()
    pipe.evaluate(x, target=x)
    alone.eval()
    for rows in x.chunk(4):
        alone(rows)
    assert_same_grads(model, alone)
    expected = dict(alone.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name])


class Reader(nn.Module):
    """Takes its input by name, or in a tuple, and may change it."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(DIM, DIM), changes

    def forward(self, *, pair: tuple[Tensor, float]) -> Tensor:
        x = pair[0].mul_(pair[1]) if self.changes else pair[0]
        return self.linear(x + 0.5).tanh() + 0


class Adding(nn.Module):
    """Changes a block's input in place, in the block or after it. As long as nothing is recomputed, both are fine."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.blocks, self.within = nn.ModuleList([Reader(within), Reader(within)]), within

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            y = block(pair=(x, 2.0))
            x = y if self.within else x.add_(y)
        return x * 1


@pytest.mark.parametrize("within", [True, False])
def test_inputs_that_are_changed_in_place_are_refused(within: bool) -> None:
    """A checkpoint looks at tensors that are passed one by one, and not at others: gradients were wrong."""
    plan = replace(schedule.make("1f1b", ranks=1, microbatches=2), recompute=(0,))
    pipe = Pipeline(Adding(within), schedule=plan, loss_fn=F.mse_loss, ranks=1, transport=LocalTransport())
    x = torch.randn(ROWS, DIM)
    what = "cannot change in place what it is called with" if within else "must find its inputs as they were"
    with pytest.raises(PipelineError, match=f"what is recomputed {what}.*got a.* Reader that"):
        pipe.step(x, target=x)


def test_a_buffer_that_changes_only_later_is_refused() -> None:
    class Late(Fading):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls >= 2:
                self.mask.mul_(2.0)
            self.calls += 1
            return self.linear(x) * self.mask.clone()

    plan = replace(schedule.make("gpipe", ranks=1, microbatches=4), recompute=(0,))
    pipe = Pipeline({0: Late(True)}, schedule=plan, loss_fn=F.mse_loss, ranks=1, transport=LocalTransport())
    x = torch.randn(ROWS, DIM)
    with pytest.raises(PipelineError, match=r"must change the same buffers in every call.*now changes mask"):
        pipe.step(x, target=x)


def test_a_buffer_that_only_some_calls_change() -> None:
    """What a call leaves alone, a later one changes before the backward of the first."""

    class Sometimes(Fading):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls % 2 == 0:
                self.factor.mul_(0.5).add_(x.detach().mean(0))
            self.calls += 1
            return (self.linear(x) * self.factor.clone()).tanh()

    model = nn.ModuleList([Sometimes(True), Sometimes(True)])
    alone, x = copy.deepcopy(model), torch.randn(ROWS, DIM)
    plan = replace(schedule.make("gpipe", ranks=2, microbatches=4), recompute=(0, 1))
    stages = dict(enumerate(model))
    pipe = Pipeline(stages, schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport())
    pipe.step(x, target=x)
    for rows in x.chunk(4):
        (F.mse_loss(alone[1](alone[0](rows)), rows) / 4).backward()
    assert_same_grads(model, alone)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_others_change_before_the_backward(in_place: bool) -> None:
    """In place, plain autograd refuses it. Another tensor in its place changes nothing: the first run had the old."""
    model = Fading(True)
    x = torch.randn(ROWS, DIM)
    again = RecomputedForward(model, lambda x: (model.linear(x) * model.mask).tanh())
    (model.linear(x) * model.mask).tanh().sum().backward()
    expected = model.linear.weight.grad
    model.linear.weight.grad = None
    output = again(x)
    if in_place:
        model.mask.mul_(2.0)
        with pytest.raises(PipelineError, match="must find the buffers that it only reads as they were; got mask"):
            output.sum().backward()
    else:
        model.mask = mask = torch.zeros(DIM)
        output.sum().backward()
        torch.testing.assert_close(model.linear.weight.grad, expected)
        assert model.mask is mask


def test_blocks_that_cannot_run_again_are_not_asked_to() -> None:
    """With memory= and by fit, such a model was refused, however much memory there was."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM)) for _ in range(4)])

    model, alone, x = made(), made(), torch.randn(ROWS, DIM)
    options: dict[str, Any] = {"sample": x[:2], "sample_target": x[:2], "memory": "1GB", "transport": LocalTransport()}
    pipe = Pipeline(model, schedule="1f1b", n_microbatches=4, loss_fn=F.mse_loss, ranks=2, **options)
    pipe.step(x.clone(), target=x)
    F.mse_loss(alone(x.clone()), x).backward()
    assert_same_grads(model, alone)
    assert not any(way.recompute for way in fit(made(), x[:2], ranks=2, n_microbatches=4).ways)


class Chancy(nn.Module):
    """Weighs what it adds by chance, as Python or numpy have it."""

    def __init__(self, by_numpy: bool) -> None:
        super().__init__()
        self.linear, self.by_numpy = nn.Linear(DIM, DIM), by_numpy

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * float(numpy.random.rand() if self.by_numpy else random.random())


@pytest.mark.parametrize("by_numpy", [False, True])
def test_random_numbers_of_python_are_the_same_again(by_numpy: bool) -> None:
    """Checkpoints of torch do not see to these: gradients were those of other numbers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Chancy(by_numpy) for _ in range(4)]), torch.randn(ROWS, DIM)
    models, drawn = [model, copy.deepcopy(model)], []
    for each, stages in zip(models, ((0, 1), ()), strict=True):
        plan = replace(schedule.make("1f1b", ranks=2, microbatches=4), recompute=stages)
        parts = {0: each[:2], 1: each[2:]}
        pipe = Pipeline(parts, schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport())
        random.seed(1), numpy.random.seed(1)
        pipe.step(x, target=x)
        drawn.append((random.random(), numpy.random.rand()))
    assert_same_grads(*models)
    assert drawn[0] == drawn[1]


class Counted(nn.Module):
    """Weighs by how often it was called, and adds what it made the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.rows = nn.Linear(DIM, DIM), 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows.append(len(x))
        y = self.inner(x).tanh() * self.calls / sum(self.rows) ** 0.5 + getattr(self.inner, "last", 0)
        self.inner.last = y.detach()
        return y.sin()


@pytest.mark.parametrize("whole", [True, False])
def test_attributes_are_as_they_were(whole: bool) -> None:
    """They were counted twice, and gradients were those of other numbers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Counted() for _ in range(4)]), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(model)
    plan = replace(schedule.make("zb-h1", ranks=2, microbatches=4), recompute=(0, 1))
    pipe = Pipeline(
        model if whole else {0: model[:2], 1: model[2:]}, schedule=plan, loss_fn=F.mse_loss, ranks=2,
        transport=LocalTransport(),
    )  # fmt: skip
    for _ in range(2):
        pipe.step(x, target=x)
        for rows in x.chunk(4):
            (F.mse_loss(alone(rows), rows) / 4).backward()
    assert_same_grads(model, alone)
    for mine, other in zip(model, alone, strict=True):
        assert mine.calls == other.calls == len(mine.rows) == len(other.rows) == 8
        torch.testing.assert_close(mine.inner.last, other.inner.last)


class Noting(nn.Module):
    """Appends to a list that it is called with, and weighs by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, made: list[Tensor]) -> Tensor:
        made.append(x)
        return self.linear(x).tanh() * len(made)


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for block in self.blocks:
            x = block(x, made)
        return x + torch.stack(made).sum(0)


def test_objects_that_are_changed_are_refused() -> None:
    """By blocks that run again, and by those of one stage that others do not run: their list remained empty."""
    x = torch.randn(ROWS, DIM)
    call = RecomputedForward(block := Noting(), block)
    with pytest.raises(PipelineError, match=r"cannot change an object.*got a Noting that changes a list"):
        call(x, [])
    options: dict[str, Any] = {"n_microbatches": 4, "loss_fn": F.mse_loss, "ranks": 2, "transport": LocalTransport()}
    with pytest.raises(PipelineError, match=r"blocks\.0 changes a list that it is called with, which no other stage"):
        Pipeline(Noted(), schedule="1f1b", **options).step(x, target=x)
