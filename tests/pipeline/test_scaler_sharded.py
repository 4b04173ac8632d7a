"""Loss scaling of stages that are sharded in part: torch's operator takes no mixture of plain and sharded gradients."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gloo import on_ranks
from sharded_cases import DIM, assert_same, make_mesh
from sternway.pipeline import GradScaler, Pipeline


def _partly_sharded(rank: int) -> None:
    mesh = make_mesh()
    place, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
    stages = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(2)]
    reference = copy.deepcopy(nn.Sequential(*stages))
    stage = stages[place]
    fully_shard(stage[0], mesh=mesh["dp_shard"])
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    pipe = Pipeline({place: stage}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, scaler=scaler)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (pipe, reference))
    x, target = torch.randn(8, DIM), torch.randn(8, DIM)
    for bad in (False, True):
        if bad and rank == 3:
            stage[2].bias.register_hook(lambda grad: grad * torch.inf)  # a plain parameter, on one process of four
        pipe.step(x.chunk(2)[part], target=target.chunk(2)[part])
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if not bad:
            F.mse_loss(reference(x), target).backward()
            theirs.step()
            theirs.zero_grad()
        assert scaler.get_scale() == (4.0 if bad else 8.0)
        assert_same(stage, reference[place], "after the step")
    pipe.close()


def test_stages_that_are_sharded_in_part() -> None:
    on_ranks(4, _partly_sharded)
