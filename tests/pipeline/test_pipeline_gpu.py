"""The pipeline in one process on a real GPU: all ranks share it."""

from __future__ import annotations

import copy

import pytest
import torch
from models import gpt
from torch import nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway import schedule
from sternway.pipeline import LocalTransport, Pipeline

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
