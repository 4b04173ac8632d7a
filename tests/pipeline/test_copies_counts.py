"""Copies of a pipeline whose rows have different numbers of labels: sums are divided by the labels of all copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gloo import on_ranks
from parallel_models import whole
from sternway.pipeline import Pipeline

DIM, ROWS, CLOSE = 6, 8, {"rtol": 1e-4, "atol": 1e-6}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4)))


def rows_and_labels() -> tuple[Tensor, Tensor]:
    """The second half of the rows has one label that counts; the first half has all."""
    torch.manual_seed(1)
    x, labels = torch.randn(ROWS, DIM), torch.randint(0, DIM, (ROWS,))
    labels[ROWS // 2 + 1 :] = -100
    return x, labels


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def check_step(mesh: DeviceMesh, copy: int, **options: Any) -> None:
    x, labels = rows_and_labels()
    pipe = Pipeline(blocks(), schedule="zb-h1", n_microbatches=2, loss_fn=counted, mesh=mesh, **options)
    mine = x.chunk(2)[copy], labels.chunk(2)[copy]
    reference = blocks()
    expected = dict(reference.named_parameters())
    for _ in range(2):
        loss = pipe.step(mine[0], target=mine[1], loss_everywhere=True).loss
        total, count = counted(reference(x), labels)
        (total / count).backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), expected[name].grad, **CLOSE)
            parameter.grad = None
        reference.zero_grad()
        own, many = counted(reference(mine[0]), mine[1])
        torch.testing.assert_close(loss, (own / many).detach(), **CLOSE)  # that of this copy's rows
    torch.testing.assert_close(pipe.evaluate(mine[0], target=mine[1]).loss, (own / many).detach(), **CLOSE)
    pipe.close()


def _copies(rank: int) -> None:
    check_step(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")), rank // 2)


def _shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))

    def shard(stage: nn.Module) -> None:
        fully_shard(stage, mesh=mesh["dp_shard"])

    x, labels = (each[:2] for each in rows_and_labels())
    check_step(mesh, rank // 2, shard=shard, sample=x, sample_target=labels)


def _a_copy_alone(rank: int) -> None:
    """One copy may be evaluated alone: nothing waits for the others then."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe = Pipeline(blocks(), schedule="1f1b", n_microbatches=2, loss_fn=counted, mesh=mesh)
    x, labels = rows_and_labels()
    if rank < 2:
        own, many = counted(blocks()(x), labels)
        torch.testing.assert_close(pipe.evaluate(x, target=labels).loss, (own / many).detach(), **CLOSE)
    pipe.close()


def test_copies_with_uneven_counts() -> None:
    on_ranks(4, _copies)


def test_shards_with_uneven_counts() -> None:
    on_ranks(4, _shards)


def test_a_copy_is_evaluated_alone() -> None:
    on_ranks(4, _a_copy_alone)
