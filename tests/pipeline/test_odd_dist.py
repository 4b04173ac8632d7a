"""Gradients that are missing, thawed layers, complex numbers and infinities on two gloo ranks, beside one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import Pipeline

DIM = 4
X = torch.linspace(-1, 1, 8 * DIM).view(8, DIM)


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, dtype=dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Unused(Layers):
    """A layer that both stages call, and that gets no gradient in either."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[2](x + self.layers[1](x).detach())
        return self.layers[3](x + self.layers[1](x).detach())


class Normed(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1], self.on = nn.BatchNorm1d(DIM), False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (float("inf") if self.on else 1.0)


def build(model: nn.Module, sample: Tensor = X[:2], **options: Any) -> Pipeline:
    options = {"loss_fn": F.mse_loss, "cuts": ["layers.2"], "schedule": "zb-h1"} | options
    return Pipeline(model, n_microbatches=2, sample=sample, **options)


def assert_same(pipe: Pipeline, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        grad = expected[name].grad
        assert (parameter.grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)
    state = plain.state_dict()
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name])


def _freeze(frozen: bool, *models: Layers) -> None:
    for model in models:
        model.layers[:2].requires_grad_(not frozen)


def _missing() -> None:
    """A parameter of several ranks without a gradient got zeros, by which AdamW makes it smaller."""
    model = Unused()
    plain, pipe = copy.deepcopy(model), build(model)
    pipe.step(X, target=X)
    F.mse_loss(plain(X), X).backward()
    assert_same(pipe, plain)
    pipe.close()


def _thawed() -> None:
    """Whoever freezes layers of the model, on every rank, had to say dynamic=True."""
    for dynamic in (True, False):
        model = Layers()
        _freeze(True, model)
        plain, pipe = copy.deepcopy(model), build(model, dynamic=dynamic)
        for frozen in (True, False, True):
            _freeze(frozen, model, plain)
            model.layers[0].requires_grad_(False)  # the stage sends what needs a gradient, or not, all the same
            plain.layers[0].requires_grad_(False)
            pipe.step(X, target=X)
            F.mse_loss(plain(X), X).backward()
            assert_same(pipe, plain)
        pipe.close()


def _thawed_alone(rank: int, folder: str) -> None:
    """A layer that the second rank thaws, and the first one does not know of."""
    model = Layers()
    model.layers[:3].requires_grad_(False)
    pipe = build(model, schedule="zb-v", cuts=["layers.1", "layers.2", "layers.3"], reports=folder)
    pipe.step(X, target=X)
    dist.barrier()  # rank 1, which waits for no gradient, would fail while rank 0 is in the step before
    model.layers[2].requires_grad_(rank == 1)
    kind = PipelineError if rank == 1 else LostRankError
    with pytest.raises(kind, match=r"need gradients as there; got float32 with gradient, not float32 without gradient"):
        pipe.step(X, target=X)


def _infinite() -> None:
    """The hooks that look for the module were taken for code of the model, which other ranks did not run."""
    model = Normed()
    plain, pipe = copy.deepcopy(model), build(model)
    for on in (True, False):
        model.on = on
        pipe.step(X, target=X, nonfinite="skip")
        for rows in X.chunk(2):
            (F.mse_loss(plain(rows), rows) / 2).backward()
        if on:
            plain.zero_grad()
    assert pipe.skipped == 1
    assert_same(pipe, plain)
    pipe.close()


def _complex_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().square().mean()


def _complex() -> None:
    """W told nodes of complex parameters that they had run, by a backward from a complex number."""
    model, x = Layers(torch.complex64), torch.complex(X, -X)
    plain, pipe = copy.deepcopy(model), build(model, x[:2], loss_fn=_complex_loss)
    pipe.step(x, target=x)
    _complex_loss(plain(x), x).backward()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    assert_same(pipe, plain)
    pipe.close()


def _on_ranks(rank: int, folder: str) -> None:
    _missing()
    _infinite()
    _complex()
    _thawed()
    _thawed_alone(rank, folder)


def test_on_two_ranks(tmp_path: Path) -> None:
    on_ranks(2, _on_ranks, str(tmp_path))
