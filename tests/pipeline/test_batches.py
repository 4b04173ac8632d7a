"""What a batch consists of besides rows: single rows for all, several for each, and numbers of rows that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM = 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, more: dict[str, Any]) -> Tensor:
        y = self.first(x) * more.get("scale", 1)
        if "images" in more:
            y = y + more["images"].view(len(x), -1, DIM).sum(1)
        return self.last(y.tanh()) + more.get("shift", 0)


def pipe_of(model: nn.Module, n_microbatches: int) -> Pipeline:
    options: dict[str, Any] = {"schedule": "zb-h1", "ranks": 2, "loss_fn": F.mse_loss}
    return Pipeline(model, n_microbatches=n_microbatches, transport=LocalTransport(), **options)


@pytest.mark.parametrize(
    "more",
    [
        {"scale": torch.rand(1, DIM), "shift": torch.rand(1, 1), "none": None},
        {"images": torch.rand(14, DIM)},  # two for each row
    ],
)
def test_single_rows_and_several_for_each(more: dict[str, Any]) -> None:
    model = Model()
    reference, x, target = copy.deepcopy(model), torch.randn(7, DIM), torch.randn(7, DIM)
    result = pipe_of(model, 3).step(x, more, target=target)
    loss = F.mse_loss(reference(x, more), target)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_same_grads(model, reference)


def test_other_rows_are_refused() -> None:
    """They were cut by themselves: a vector as long as there are microbatches became one number for each."""
    scale, x = torch.rand(DIM), torch.randn(8, DIM)
    with pytest.raises(PipelineError, match=r"must have its rows.*the batch has 8; got 4 rows .* shape \(4,\)"):
        pipe_of(Model(), 4).step(x, {"scale": scale}, target=x)
    assert pipe_of(Model(), 1).step(x, {"scale": scale}, target=x).loss is not None  # nothing is cut


class Names(nn.Module):
    """The last stage uses one argument more, and another if there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x = self.layers[2](x + y)
        return self.layers[3](x if scale is None else x * scale)


CALLS: list[Callable[[Any, dict[str, Tensor]], Any]] = [
    lambda call, batch: call(y=batch["y"], x=batch["x"]),
    lambda call, batch: call(x=batch["x"], y=batch["y"]),
    lambda call, batch: call(batch["x"], batch["y"]),
    lambda call, batch: call(scale=batch["scale"], y=batch["y"], x=batch["x"]),
    lambda call, batch: call(batch["x"], scale=batch["y"], y=batch["scale"]),
]


def assert_calls_are_plain(model: nn.Module, **options: Any) -> None:
    reference, sample = copy.deepcopy(model), {"x": torch.randn(2, DIM), "y": torch.randn(2, DIM)}
    options = {"schedule": "zb-h1", "cuts": ["layers.2"], "loss_fn": F.mse_loss} | options
    pipe = Pipeline(model, n_microbatches=2, sample=sample, **options)
    batch = {name: torch.linspace(-1, 1, 4 * DIM).view(4, DIM) * place for place, name in enumerate("xy", 1)}
    batch["scale"], target = batch["x"].cos(), batch["x"].sin()
    for call in CALLS:
        call(partial(pipe.step, target=target), batch)
        F.mse_loss(call(reference, batch), target).backward()
        theirs = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
    pipe.close()


def test_arguments_in_another_order_than_the_samples() -> None:
    """It was a KeyError, or a value that was not sent."""
    assert_calls_are_plain(Names(), ranks=2, transport=LocalTransport())


def _on_ranks(rank: int) -> None:
    assert_calls_are_plain(Names())


def test_arguments_in_another_order_on_two_gloo_ranks() -> None:
    on_ranks(2, _on_ranks)
