"""Kinds of numbers that a pipeline trains with, each equal to one process: the same cases on gloo and on NCCL.

Each case is called on every rank with its rank and its device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import convnet, gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compiled import compiled as compile_ours
from sternway import schedule
from sternway.pipeline import GradScaler, Pipeline

DIM, COUNT = 16, 4


def stages_of(make: Callable[[], list[nn.Module]], device: str) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The same stages twice: for the pipeline, and for one process."""
    torch.manual_seed(0)
    stages = nn.ModuleList(make()).to(device)
    return stages, copy.deepcopy(stages)


def through(stages: nn.ModuleList, x: Tensor, target: Tensor, loss_fn: Any = F.mse_loss) -> Tensor:
    """One process, microbatch by microbatch; returns the loss."""
    total = torch.zeros((), device=x.device)
    for part, goal in zip(x.chunk(COUNT), target.chunk(COUNT), strict=True):
        for stage in stages:
            part = stage(part)
        loss = loss_fn(part, goal).float() / COUNT
        loss.backward()
        total += loss.detach()
    return total


def same_grads(mine: nn.Module, reference: nn.Module, rtol: float, atol: float) -> None:
    for (name, p), q in zip(mine.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def blocks() -> list[nn.Module]:
    return [gpt(DIM, 1, heads=2), gpt(DIM, 1, heads=2)]


def batch(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, DIM, device=device, dtype=dtype), torch.randn(8, 4, DIM, device=device, dtype=dtype)


def half(rank: int, device: str, dtype: torch.dtype) -> None:
    """Parameters in half precision. The loss is summed in float32."""
    stages, reference = stages_of(blocks, device)
    stages.to(dtype)
    reference.to(dtype)
    pipe = Pipeline({rank: stages[rank]}, schedule="zb-h1", n_microbatches=COUNT, loss_fn=F.mse_loss)
    for _ in range(3):
        x, target = batch(device, dtype)
        result = pipe.step(x, target=target, loss_everywhere=True)
        loss = through(reference, x, target)
        assert result.loss.dtype == torch.float32
        torch.testing.assert_close(result.loss, loss, rtol=1e-3, atol=1e-4)
        same_grads(stages[rank], reference[rank], 2e-2, 2e-3)
    pipe.close()


def autocast(rank: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    stages, reference = stages_of(blocks, device)
    pipe = Pipeline({rank: stages[rank]}, schedule="zb-h1", n_microbatches=COUNT, loss_fn=F.mse_loss)
    for _ in range(3):
        x, target = batch(device)
        with torch.autocast(device, dtype):
            pipe.step(x, target=target)
            for part, goal in zip(x.chunk(COUNT), target.chunk(COUNT), strict=True):
                for stage in reference:
                    part = stage(part)
                loss = F.mse_loss(part, goal) / COUNT
                with torch.autocast(device, enabled=False):
                    loss.backward()
        same_grads(stages[rank], reference[rank], 2e-2, 1e-4)
    pipe.close()


def scaler(rank: int, device: str) -> None:
    """Loss scaling: one rank's infinite gradient makes all ranks skip, and the scale stays the same on all."""
    stages, reference = stages_of(blocks, device)
    mine, theirs = GradScaler(device, init_scale=64.0), torch.amp.GradScaler(device, init_scale=64.0)
    pipe = Pipeline({rank: stages[rank]}, schedule="1f1b", n_microbatches=COUNT, loss_fn=F.mse_loss, scaler=mine)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (stages[rank], reference)]
    for number in range(4):
        x, target = batch(device)
        result = pipe.step(x, target=target, loss_everywhere=True)
        loss = through(reference, x, target, lambda y, goal: theirs.scale(F.mse_loss(y, goal)))
        torch.testing.assert_close(result.loss, loss / theirs.get_scale(), rtol=1e-4, atol=1e-6)
        if number == 1:  # on one rank alone
            bad = next(iter(reference[1].parameters()))
            bad.grad.view(-1)[0] = float("inf")
            if rank == 1:
                next(iter(stages[1].parameters())).grad.view(-1)[0] = float("inf")
        if number == 2:
            mine.unscale_(optimizers[0])
            theirs.unscale_(optimizers[1])
            norms = pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torch.testing.assert_close(*norms, rtol=1e-4, atol=1e-6)
        for each, optimizer in zip((mine, theirs), optimizers, strict=True):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        assert mine.get_scale() == theirs.get_scale()
        for p, q in zip(stages[rank].parameters(), reference[rank].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    assert mine.get_scale() == 32.0
    pipe.close()


class FormatOf(nn.Module):
    """Notes whether what arrives is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        return x


def channels_last(rank: int, device: str) -> None:
    def make() -> list[nn.Module]:
        whole = list(convnet(8, 2))
        return [nn.Sequential(*whole[:3]), nn.Sequential(FormatOf(), *whole[3:])]

    stages, reference = stages_of(make, device)
    for each in (stages, reference):
        each.to(memory_format=torch.channels_last)
    pipe = Pipeline({rank: stages[rank]}, schedule="zb-h1", n_microbatches=COUNT, loss_fn=F.mse_loss)
    for _ in range(3):
        x = torch.randn(8, 3, 6, 6, device=device).to(memory_format=torch.channels_last)
        target = torch.randn(8, 8, 6, 6, device=device)
        pipe.step(x, target=target)
        through(reference, x, target)
        same_grads(stages[rank], reference[rank], 2e-3, 1e-4)
    if rank == 1:
        assert stages[1][0].seen == [True] * (3 * COUNT)
    pipe.close()


def compiled(rank: int, device: str, backend: str, inner: str = "eager") -> None:
    torch._dynamo.reset()
    stages, reference = stages_of(lambda: [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(2)], device)
    module = (
        compile_ours(stages[rank], inner) if backend == "sternway" else torch.compile(stages[rank], backend=backend)
    )
    pipe = Pipeline({rank: module}, schedule="zb-h1", n_microbatches=COUNT, loss_fn=F.mse_loss)
    for _ in range(3):
        x, target = torch.randn(8, DIM, device=device), torch.randn(8, DIM, device=device)
        pipe.step(x, target=target)
        through(reference, x, target)
        same_grads(stages[rank], reference[rank], 2e-3, 1e-4)
    pipe.close()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


def dropout(rank: int, ranks: int, device: str, name: str, found: Any) -> None:
    """Four stages on some ranks: puts the gradients of this rank's stages into ``found``."""
    plan = schedule.make(name, ranks=ranks, microbatches=COUNT)
    stages, _ = stages_of(lambda: [Dropping() for _ in range(4)], device)
    assert plan.num_stages == 4
    pipe = Pipeline({i: stages[i] for i in plan.placement[rank]}, schedule=plan, loss_fn=F.mse_loss)
    torch.manual_seed(3)
    x, target = torch.randn(8, DIM, device=device), torch.randn(8, DIM, device=device)
    if rank:
        torch.manual_seed(rank)  # the seed of the first rank counts
    for _ in range(2):
        pipe.step(x, target=target)
    for i in plan.placement[rank]:
        found.put((name, ranks, i, stages[i].layer.weight.grad.cpu().tolist()))
    pipe.close()


class Tell(nn.Module):
    """Creates a file in its ``when``-th forward."""

    def __init__(self, path: Path, when: int) -> None:
        super().__init__()
        self.path, self.left = path, when

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            self.path.touch()
        return x
