"""What docs/training.md says about loops: autocast, loss scaling, accumulation, learning rates, evaluation.

Each is compared with the same loop in plain torch on the whole model.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sternway.pipeline import GradScaler, LocalTransport, Pipeline


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0)) for _ in range(4)))


def _batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(count)]


def _pipe(model: nn.Module, scaler: GradScaler | None = None) -> Pipeline:
    return Pipeline(
        model,
        schedule="zb-h1",
        n_microbatches=4,
        loss_fn=F.mse_loss,
        ranks=2,
        transport=LocalTransport(),
        scaler=scaler,
    )


def _equal(model: nn.Module, plain: nn.Module, *, grads: bool = False, **tolerance: float) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad if grads else ours, theirs.grad if grads else theirs, **tolerance)


def test_autocast() -> None:
    model = _model()
    plain, pipe = deepcopy(model), _pipe(model)
    ((x, target),) = _batches(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.step(x, target=target)
        F.mse_loss(plain(x), target).backward()
    _equal(model, plain, grads=True, rtol=0.05, atol=1e-4)  # microbatches round to bfloat16 apart
    assert model[0][0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("infinite", [False, True])
def test_loss_scaling_with_clipping(infinite: bool) -> None:
    model, scaler, theirs = _model(), GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    plain, pipe = deepcopy(model), _pipe(model, scaler)
    mine, other = torch.optim.SGD(pipe.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, (x, target) in enumerate(_batches(3)):
        lost = infinite and step == 1  # that step is left out, and the scale halved
        x = x * float("inf") if lost else x
        pipe.step(x, target=target)
        theirs.scale(F.mse_loss(plain(x), target)).backward()
        scaler.unscale_(mine)
        theirs.unscale_(other)
        if not lost:
            pipe.clip_grad_norm_(0.1)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for each, optimizer in ((scaler, mine), (theirs, other)):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
    _equal(model, plain)
    assert scaler.get_scale() == theirs.get_scale() == (4.0 if infinite else 8.0)


def test_accumulation() -> None:
    model = _model()
    plain, pipe = deepcopy(model), _pipe(model)
    for x, target in _batches(3):
        pipe.step(x, target=target)
        (F.mse_loss(plain(x), target) / 3).backward()
    for parameter in pipe.parameters():
        assert parameter.grad is not None
        parameter.grad /= 3
    _equal(model, plain, grads=True)


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
def test_learning_rates(name: str) -> None:
    options = {"OneCycleLR": {"max_lr": 0.1, "total_steps": 8}, "CosineAnnealingLR": {"T_max": 4}}.get(name, {})
    model = _model()
    plain, pipe = deepcopy(model), _pipe(model)
    mine, other = torch.optim.AdamW(pipe.parameters(), lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)
    schedulers = [getattr(torch.optim.lr_scheduler, name)(each, **options) for each in (mine, other)]
    for x, target in _batches(4):
        result = pipe.step(x, target=target, loss_everywhere=True)
        loss = F.mse_loss(plain(x), target)
        loss.backward()
        for optimizer, scheduler, seen in zip((mine, other), schedulers, (result.loss, loss), strict=True):
            optimizer.step(), optimizer.zero_grad()
            scheduler.step(*((seen.item(),) if name == "ReduceLROnPlateau" else ()))
    _equal(model, plain)
    assert mine.param_groups[0]["lr"] == other.param_groups[0]["lr"]


def test_evaluation_between_steps() -> None:
    model = _model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    pipe = _pipe(model)
    ((x, target),) = _batches(1)
    pipe.step(x, target=target)
    found = pipe.evaluate(x, target=target)
    assert model.training
    with torch.no_grad():
        output = deepcopy(model).eval()(x)
    torch.testing.assert_close(found.outputs, output)
    torch.testing.assert_close(found.loss, F.mse_loss(output, target))
