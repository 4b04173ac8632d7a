"""Meshes of any dimensions: what is refused, what happens when a process fails, and many pipelines in a row."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from gloo import on_ranks
from sharded_cases import DIM, assert_same, batch, make_mesh, stages
from sternway import pipeline
from sternway.demo import GPT
from sternway.errors import PipelineError
from sternway.pipeline import Pipeline


def _refusals(rank: int) -> None:
    mesh = make_mesh()
    place, over = mesh.get_local_rank("pp"), mesh["dp_shard"]

    def make(stage: nn.Module, **options: Any) -> Pipeline:
        options = {"mesh": mesh, "loss_fn": F.mse_loss, "n_microbatches": 2} | options
        return Pipeline({place: stage}, schedule="1f1b", **options)

    layer = nn.Linear(DIM, DIM)
    parallelize_module(layer, over, ColwiseParallel())
    with pytest.raises(PipelineError, match=r"must not be sharded along a dimension of different data; got weight"):
        make(layer)
    layer = nn.Linear(DIM, DIM)
    fully_shard(layer, mesh=over)
    with pytest.raises(PipelineError, match=r"needs the mesh of all their ranks; got weight, .* no mesh=\. Fix: pass"):
        make(layer, mesh=None, transport=pipeline.LocalTransport(), ranks=2)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    fully_shard(model, mesh=over)
    with pytest.raises(PipelineError, match=r"not on a whole model before it is cut; .* shard="):
        Pipeline(model, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh)
    with pytest.raises(PipelineError, match=r'must have a dimension "stages"'):
        make(nn.Linear(DIM, DIM), pp_dim="stages")
    with pytest.raises(PipelineError, match=r"data_dims must be names of dimensions .* got \('pp',\)"):
        make(nn.Linear(DIM, DIM), data_dims=("pp",))
    with pytest.raises(PipelineError, match=r"data or parameters must differ; got \"dp_shard\""):
        make(nn.Linear(DIM, DIM), data_dims=())
    with pytest.raises(PipelineError, match="shard is for a whole model that is cut over a mesh; got stages"):
        make(nn.Linear(DIM, DIM), shard=lambda stage: None)
    outside = GPT(vocabulary=11, dim=DIM, heads=2, layers=2, length=6)
    with pytest.raises(PipelineError, match="shard needs to know what the stages use; got no sample"):
        Pipeline(outside, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, shard=lambda stage: None)


def test_refusals() -> None:
    on_ranks(4, _refusals)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(DIM, DIM), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("no luck")
        return self.layer(x)


def _breaks(rank: int) -> None:
    """One process of four fails and ends; those that wait for its shards, too, raise, and have their shards again."""
    mesh = make_mesh()
    stage = Breaks() if rank == 0 else nn.Linear(DIM, DIM)
    fully_shard(stage, mesh=mesh["dp_shard"])
    pipe = Pipeline(
        {mesh.get_local_rank("pp"): stage}, schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss, mesh=mesh
    )
    with pytest.raises(PipelineError, match="no luck" if rank == 0 else r".*"):
        pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    assert all(isinstance(p, DTensor) and p.grad is None for p in stage.parameters())
    os._exit(0)


def test_a_process_that_fails() -> None:
    on_ranks(4, _breaks, timeout=60)


def _any_names(rank: int) -> None:
    """A pipeline dimension of another name, in the middle; one of the others has the same data and plain copies."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("rows", "stages", "cp"))
    place, copy = mesh.get_local_rank("stages"), mesh.get_local_rank("rows")
    mine, reference = stages(2), nn.Sequential(*stages(2))
    pipe = Pipeline(
        {place: mine[place]}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, pp_dim="stages",
        data_dims=("rows", "cp"),
    )  # fmt: skip
    torch.manual_seed(1)
    x, target = batch(8)
    pipe.step(x.chunk(2)[copy], target=target.chunk(2)[copy])
    F.mse_loss(reference(x), target).backward()
    assert_same(mine[place], reference[place], "any names")
    pipe.close()


def test_a_mesh_of_any_names() -> None:
    on_ranks(4, _any_names)


def _many_pipelines(rank: int) -> None:
    """Whole models, whose pipelines ask all processes of the mesh: groups of the same members get other names."""
    mesh = make_mesh()
    x = torch.randn(4, DIM)
    for _ in range(6):
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
        pipe = Pipeline(model, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh, sample=x[:2])
        pipe.step(x, target=x)
        pipe.close()


def test_many_pipelines_in_one_process() -> None:
    on_ranks(4, _many_pipelines)
