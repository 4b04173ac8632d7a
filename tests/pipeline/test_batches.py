"""What a batch consists of besides rows: single rows for all, several for each, and numbers of rows that do not fit."""

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
