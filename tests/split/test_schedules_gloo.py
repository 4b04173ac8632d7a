"""torch.distributed.pipelining's own schedules over our split, on two gloo ranks: gradients equal one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import gpt
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import TORCH, on_ranks
from sternway import split

DIM, MICROBATCHES = 8, 4
SCHEDULES = {  # name: stages on each of the two ranks
    "Schedule1F1B": ([0], [1]),
    "ScheduleInterleavedZeroBubble": ([0, 2], [1, 3]),
    "ScheduleZBVZeroBubble": ([0, 3], [1, 2]),
    "ScheduleDualPipeV": ([0, 3], [1, 2]),
}


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(DIM, 1, heads=2) for _ in range(count)]


def _train(rank: int, name: str) -> None:
    mine = SCHEDULES[name][rank]
    whole = _stages(sum(map(len, SCHEDULES[name])))
    x, target = torch.randn(2 * MICROBATCHES, 4, DIM), torch.randn(2 * MICROBATCHES, 4, DIM)
    stages = [pipelining.PipelineStage(whole[i], i, len(whole), torch.device("cpu")) for i in mine]
    calls: dict[str, int] = {}

    def counted(module: Any, function: str) -> None:
        real = getattr(module, function)

        def count(*arguments: Any) -> Any:
            calls[function] = calls.get(function, 0) + 1
            return real(*arguments)

        setattr(module, function, count)

    with split.install():
        for function in ("stage_backward", "stage_backward_input", "stage_backward_weight"):
            counted(pipelining.stage, function)
        single = issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle)
        schedule = getattr(schedules, name)(stages[0] if single else stages, MICROBATCHES, loss_fn=F.mse_loss)
        arguments = (x,) if 0 in mine else ()
        options = {"target": target} if len(whole) - 1 in mine else {}
        schedule.step(*arguments, **options)
    assert calls["stage_backward"] >= 1 if name == "Schedule1F1B" else calls["stage_backward_input"] >= 1
    assert calls.get("stage_backward_input", 0) == calls.get("stage_backward_weight", 0)

    reference = _stages(len(whole))
    for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        for stage in reference:
            part = stage(part)
        (F.mse_loss(part, goal) / MICROBATCHES).backward()
    for index in mine:
        assert_same_grads(whole[index], reference[index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_equal_one_process(name: str) -> None:
    if TORCH < (2, 13) and SCHEDULES[name][0] == [0, 3]:
        pytest.skip("torch's V schedules send to themselves, which gloo refuses")
    on_ranks(2, _train, name)
