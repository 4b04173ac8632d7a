"""Sharded stages on four small GPUs: the cases of ``test_sharded.py`` over NCCL, and no wait on the host."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import sharded_cases
from matrix_cases import SCHEDULES, Cells, run_row
from nccl_cases import no_waits
from sharded_cases import MICROBATCHES, batch, build, every_block, make_mesh
from small_gpus import on_small_gpus
from sternway import schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


def _runs_ahead(rank: int) -> None:
    """After the first steps, the host waits for nothing; and the gradients are right all the same."""
    mesh = make_mesh("cuda")
    copy = mesh.get_local_rank("dp_shard")
    pipe, reference = build(mesh, schedule.make("zb-v", ranks=2, microbatches=MICROBATCHES), every_block)
    torch.manual_seed(1)
    x, target = batch(4 * MICROBATCHES, "cuda")
    mine = x.chunk(2)[copy], target.chunk(2)[copy]
    for _ in range(2):
        pipe.step(mine[0], target=mine[1])
    with no_waits():
        for _ in range(2):
            pipe.step(mine[0], target=mine[1])
    for _ in range(4):
        F.mse_loss(reference(x), target).backward()
    for index, stage in pipe.stages.items():
        sharded_cases.assert_same(stage.module, reference[index], "without waits", rtol=2e-3, atol=5e-5)
    pipe.close()


def _all_cases(rank: int) -> None:
    sharded_cases.CLOSE.update(rtol=2e-3, atol=5e-5)
    _runs_ahead(rank)
    sharded_cases.every_schedule(rank, "cuda")
    sharded_cases.optimizers(rank, "cuda")
    sharded_cases.policies(rank, "cuda")


def test_sharded_stages() -> None:
    on_small_gpus(4, _all_cases, init="both")


@pytest.mark.parametrize("name", ["plain", "FSDP2", "TP", "EP", "CP"])
def test_what_composes(name: str) -> None:
    cells: Cells = {"eager": SCHEDULES, "checkpointed": ("1f1b", "zb-v"), "compiled": ("zb-h1",)}
    on_small_gpus(4, run_row, name, "cuda", {"rtol": 2e-3, "atol": 5e-5}, cells, init="both")
