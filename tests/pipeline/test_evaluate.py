"""Evaluation of a pipeline: eval mode, the loss of the batch, and one output of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway.pipeline import Chunk, LocalTransport, Pipeline, Presplit

DIM = 4


@dataclass
class Found:
    rows: Tensor
    by_row: dict[str, Tensor]
    mean: Tensor
    count: int
    note: str


class Last(nn.Module):
    """Returns tensors with rows and without, and values that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Found:
        y = self.drop(self.layer(x))
        return Found(y, {"max": y.max(-1).values}, y.mean(), len(y), "text")


def stages() -> dict[int, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.5))
    first[1].eval()  # a frozen batch norm
    return {0: first, 1: Last()}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.rows if isinstance(output, Found) else output, target)


def local(held: dict[int, nn.Module], **options: Any) -> Pipeline:
    options = {"schedule": "zb-h1", "n_microbatches": 3, "ranks": 2, "loss_fn": loss_fn} | options
    return Pipeline(held, transport=LocalTransport(), **options)


def test_nothing_is_dropped_and_each_module_gets_its_mode_back() -> None:
    held = stages()
    pipe = local(held)
    modes = [module.training for stage in held.values() for module in stage.modules()]
    x, target = torch.randn(7, DIM), torch.randn(7, DIM)
    losses = {float(pipe.evaluate(x, target=target).loss) for _ in range(3)}
    assert len(losses) == 1
    assert modes == [module.training for stage in held.values() for module in stage.modules()]
    assert False in modes
    for stage in held.values():
        stage.eval()
    expected = held[1](held[0](x))
    torch.testing.assert_close(torch.tensor(losses.pop()), F.mse_loss(expected.rows, target).detach())


def test_outputs_are_joined_along_the_batch() -> None:
    held = stages()
    pipe, x = local(held), torch.randn(7, DIM)
    found = pipe.evaluate(x).outputs
    for stage in held.values():
        stage.eval()
    with torch.no_grad():
        parts = [held[1](held[0](part)) for part in x.split(3)]
    torch.testing.assert_close(found.rows, torch.cat([part.rows for part in parts]))
    torch.testing.assert_close(found.by_row["max"], torch.cat([part.by_row["max"] for part in parts]))
    torch.testing.assert_close(found.mean, [part.mean for part in parts])  # it has no rows
    assert (found.count, found.note) == ([3, 3, 1], "text")
    assert [part.count for part in pipe.evaluate(x, join=False).outputs] == [3, 3, 1]


def test_along_another_dimension_and_not_at_all() -> None:
    torch.manual_seed(0)
    held: dict[int, nn.Module] = {0: nn.Linear(DIM, DIM), 1: nn.Linear(DIM, DIM)}
    x = torch.randn(2, 6, DIM)
    expected = held[1](held[0](x)).detach()
    torch.testing.assert_close(local(held, chunk=Chunk(1)).evaluate(x).outputs, expected)
    parts = local(held, chunk=Presplit()).evaluate(x.chunk(3, 1)).outputs
    torch.testing.assert_close(parts, list(expected.chunk(3, 1)))


def two_ranks(rank: int) -> None:
    """The loss is on every rank, also that there is none."""
    held = stages()
    pipe = Pipeline({rank: held[rank]}, schedule="1f1b", n_microbatches=2, loss_fn=loss_fn)
    x, target = torch.ones(4, DIM), torch.zeros(4, DIM)
    result = pipe.evaluate(x, target=target)
    for stage in held.values():
        stage.eval()
    expected = held[1](held[0](x))
    torch.testing.assert_close(result.loss, F.mse_loss(expected.rows, target).detach())
    if rank == 0:
        assert result.outputs is None
    else:
        torch.testing.assert_close(result.outputs.rows, expected.rows.detach())
    assert pipe.evaluate(x).loss is None
    assert (pipe.evaluate(x, target=target, loss_everywhere=False).loss is None) == (rank == 0)
    pipe.close()


def test_two_processes() -> None:
    on_ranks(2, two_ranks)
