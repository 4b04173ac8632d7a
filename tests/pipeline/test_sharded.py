"""Stages that FSDP or tensor parallelism has sharded are refused when the pipeline is built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F

from sternway import pipeline
from sternway.errors import PipelineError


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["fully_shard", "parallelize_module"])
@pytest.mark.parametrize("whole", [True, False])
def test_is_refused(mesh: DeviceMesh, how: str, whole: bool) -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    if how == "fully_shard":
        fully_shard(layers[1], mesh=mesh)
    else:
        parallelize_module(layers[1], mesh, ColwiseParallel())
    stages = nn.Sequential(*layers) if whole else dict(enumerate(layers))
    with pytest.raises(PipelineError, match=r"cannot have sharded stages; got (1\.)?weight, sharded by FSDP"):
        pipeline.Pipeline(
            stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=pipeline.LocalTransport()
        )
