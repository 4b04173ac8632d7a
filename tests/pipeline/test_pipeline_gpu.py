"""The pipeline in one process on a real GPU: all ranks share it."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from nccl_cases import no_waits
from sternway import pipeline, schedule
from sternway.pipeline import LocalTransport, Pipeline
from sternway.schedule import Costs, Schedule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


@pytest.mark.parametrize("own_stream", [False, True], ids=["current stream", "own stream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
def test_equals_one_process(name: str, dtype: torch.dtype, own_stream: bool) -> None:
    torch.manual_seed(0)
    plan = schedule.make(name, ranks=2, microbatches=4)
    stages = {index: gpt(64, 1).cuda().to(dtype) for index in range(plan.num_stages)}
    reference = copy.deepcopy(nn.Sequential(*stages.values()))
    x, target = (torch.randn(8, 16, 64, device="cuda", dtype=dtype) for _ in range(2))
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pipe = Pipeline(stages, schedule=plan, loss_fn=F.mse_loss, transport=LocalTransport("cuda"))
        result = pipe.step(x, target=target)
    torch.cuda.current_stream().wait_stream(stream)
    loss = F.mse_loss(reference(x), target)
    loss.backward()
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-1, "atol": 1e-3}
    torch.testing.assert_close(result.loss, loss.detach().float(), rtol=2e-2, atol=1e-3)
    assert_same_grads(nn.Sequential(*stages.values()), reference, **tolerance)


def test_a_step_leaves_no_memory_behind() -> None:
    stages = {index: gpt(64, 1).cuda() for index in range(2)}
    pipe = Pipeline(
        stages, schedule="zb-h1", n_microbatches=4, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport("cuda")
    )
    x, target = (torch.randn(8, 16, 64, device="cuda") for _ in range(2))
    pipe.step(x, target=target)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    pipe.step(x, target=target)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def whole() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model of four blocks, a copy of it, and a batch."""
    torch.manual_seed(0)
    model = gpt(64, 4).cuda()
    return model, copy.deepcopy(model), torch.randn(12, 32, 64, device="cuda")


def assert_steps(plan: str | Schedule, waits: bool = False, **options: Any) -> Pipeline:
    """Four steps have the gradients of one process; the last two do not wait on the host."""
    model, reference, x = whole()
    options = {"n_microbatches": 6} | options if isinstance(plan, str) else options
    transport = LocalTransport("cuda")
    pipe = Pipeline(model, schedule=plan, ranks=2, loss_fn=F.mse_loss, transport=transport, **options)
    for number in range(4):
        with no_waits() if number > 1 and not waits else nullcontext():
            pipe.step(x, target=x)
        F.mse_loss(reference(x), x).backward()
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
    pipe.close()
    return pipe


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_microbatches_that_are_offloaded(name: str, place: str, tmp_path: Path) -> None:
    plain = schedule.make(name, ranks=2, microbatches=6)
    plan = schedule.offloaded(plain, Costs(offload=0.5, memory_after_I=0.2), memory_limit=1.4)
    assert plan.moved(0)
    assert_steps(plan, waits=place == "disk", offload_to=tmp_path if place == "disk" else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [2.0, 0.8])
@pytest.mark.parametrize("name", ["1f1b", "auto"])
def test_plans_within_memory(name: str, share: float) -> None:
    """The link to the host is measured; blocks are recomputed, or microbatches offloaded, if they must be."""
    _, model, x = whole()
    sample = {"loss_fn": F.mse_loss, "target": x[:2]}
    found = pipeline.fit(model, x[:2], ranks=2, n_microbatches=6, schedule="1f1b", **sample)
    needed = next(way.peak for way in found.ways if not way.recompute)
    options: dict[str, Any] = {"sample": x[:2], "sample_target": x[:2], "tune": False}
    pipe = assert_steps(name, memory=int(share * needed), **options)
    assert share > 1 or name == "auto" or pipe.schedule.recompute or pipe.schedule.moved(0)
