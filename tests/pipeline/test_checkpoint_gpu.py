"""A pipeline on a GPU is saved as it is at the moment, resumed, and rolled back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import gpt
from torch.nn import functional as F

from sternway.pipeline import LocalTransport, Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]

DIM = 64


def _pipe() -> tuple[Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(0)
    stages = {index: gpt(DIM, 1).cuda() for index in range(2)}
    pipe = Pipeline(
        stages, schedule="zb-h1", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport("cuda")
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), 1e-2)


def _train(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x, target = torch.randn(4, 8, DIM, device="cuda"), torch.randn(4, 8, DIM, device="cuda")
        losses.append(float(pipe.step(x, target=target, record=False).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_save_in_the_background_and_resume(tmp_path: Path) -> None:
    pipe, optimizer = _pipe()
    _train(pipe, optimizer, 2)
    saving = pipe.save(tmp_path, optimizer, 2, wait=False)
    expected = _train(pipe, optimizer, 3)  # the generator that draws the batches is saved, too
    saving.wait()
    other, theirs = _pipe()
    assert other.resume(tmp_path, theirs).step == 2
    assert _train(other, theirs, 3) == pytest.approx(expected, rel=1e-4)  # kernels may sum in any order
    assert all(state["exp_avg"].is_cuda for state in theirs.state.values())


def test_a_step_on_trial_is_undone() -> None:
    pipe, optimizer = _pipe()
    _train(pipe, optimizer, 1)
    before = [p.detach().clone() for p in pipe.parameters()]
    x = torch.full((4, 8, DIM), float("nan"), device="cuda")
    pipe.step(x, target=torch.zeros_like(x))
    pipe.optimizer_step(optimizer, nonfinite="skip")
    pipe.settle()
    assert pipe.skipped == 1
    assert all(torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True))
