"""Steps in a row on small GPUs: no rank waits for a later one, nothing waits on the host, and all kinds of numbers."""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import number_cases
from compare import assert_same_grads
from gloo import processes
from nccl_cases import CLOSE, DIM, batch, blocks, no_waits, said
from number_cases import Tell
from searches import searches_at_once
from small_gpus import on_small_gpus
from sternway.pipeline import Pipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


def run_optimizer(rank: int, ranks: int) -> None:
    """Optimizer steps on trial, kept and clipped, and clipping that waits: no call waits on the host."""
    mine, reference = blocks(ranks), nn.Sequential(*blocks(ranks))
    pipe = Pipeline({rank: mine[rank]}, schedule="zb-h1", n_microbatches=2 * ranks, loss_fn=F.mse_loss)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (mine[rank], reference)]
    x, target = batch(4 * ranks)
    for number in range(3):
        with no_waits() if number else nullcontext():
            pipe.step(x, target=target)
            pipe.clip_grad_norm_(0.5)
    optimizers[0].zero_grad()
    torch.manual_seed(1)
    for number, max_norm in enumerate([1e3, 1e3, 1e3, 1e-2, 1e-2, 1e3]):
        x, target = batch(4 * ranks)
        F.mse_loss(reference(x), target).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        optimizers[1].step()
        optimizers[1].zero_grad()
        with no_waits() if number > 1 else nullcontext():  # the first loads kernels
            pipe.step(x, target=target)
            pipe.optimizer_step(optimizers[0], max_norm=max_norm)
    pipe.settle()
    for p, q in zip(mine[rank].parameters(), reference[rank].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    pipe.close()


def run_ahead(rank: int, ranks: int, folder: str) -> None:
    """The last rank begins its third step only after the first rank has begun its own."""
    count, told = 2 * ranks, Path(folder) / f"told-{ranks}"
    mine, reference = blocks(ranks), nn.Sequential(*blocks(ranks))
    held = nn.Sequential(Tell(told, 2 * count + 1), mine[rank]) if rank == 0 else mine[rank]
    pipe = Pipeline({rank: held}, schedule="zb-h1", n_microbatches=count, loss_fn=F.mse_loss)
    torch.manual_seed(1)
    x, target = batch(4 * ranks)
    for number in range(4):
        end = time.monotonic() + 30
        while number == 2 and rank == ranks - 1 and not told.exists():
            assert time.monotonic() < end, "the first rank did not begin its next step"
            time.sleep(0.01)
        pipe.step(x, target=target)
        F.mse_loss(reference(x), target).backward()
    assert_same_grads(mine[rank], reference[rank], **CLOSE)
    pipe.close()


def run_auto(rank: int, ranks: int) -> None:
    """Plans that change between steps: the same gradients, by the same plan on all ranks, and no wait on the host."""
    model, reference = (nn.Sequential(*blocks(2 * ranks)) for _ in range(2))
    count = 2 * ranks
    torch.manual_seed(1)
    x, target = batch(2 * count)
    with searches_at_once():
        pipe = Pipeline(model, schedule="auto", n_microbatches=count, loss_fn=F.mse_loss, sample=x[:2])
    F.mse_loss(reference(x), target).backward()
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    ran = []
    while not pipe.plans or len(ran) < 30:
        same = bool(ran) and ran[-1] is pipe.schedule
        ran.append(pipe.schedule)
        with no_waits() if same else nullcontext():
            pipe.step(x, target=target, record=False)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], **CLOSE)
            parameter.grad = None
        assert len(ran) < 160, "no plan was kept"  # plans that are close are compared for longer
    assert len({plan.actions for plan in ran}) > 1, "several orders were run"
    everyone = pipe.transport.crew().share([plan.actions for plan in ran])
    assert all(orders == everyone[0] for orders in everyone)
    pipe.close()


class Aside(nn.Module):
    """Blocks, and a value that goes through all stages and leads to nothing."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))
        self.extra = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        aside = self.extra(x)
        for layer in self.layers[1:]:
            x = layer(x).tanh()
        aside.sin()
        return x


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def run_looks(rank: int, ranks: int, device: str = "cuda") -> None:
    """What is looked at at the end of a step, counts and values that lead to nothing: no call waits on the host."""
    torch.manual_seed(0)
    model = Aside(2 * ranks).to(device)
    reference = copy.deepcopy(model)
    x = torch.randn(4 * ranks, 8, DIM, device=device)
    pipe = Pipeline(
        model, schedule="zb-h1", n_microbatches=2 * ranks, loss_fn=counted, sample=x[:2],
        cuts=[f"layers.{2 * place}" for place in range(1, ranks)],
    )  # fmt: skip
    for number in range(4):
        labels = torch.randint(DIM, (4 * ranks, 8), device=device)
        labels[number, number:] = -100
        with no_waits() if number > 1 and device == "cuda" else nullcontext():
            pipe.step(x, target=labels)
        total, count = counted(reference(x), labels)
        (total / count).backward()
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, **CLOSE)
    pipe.close()


def run_numbers(rank: int) -> None:
    cases = {
        "bfloat16": lambda: number_cases.half(rank, "cuda", torch.bfloat16),
        "float16": lambda: number_cases.half(rank, "cuda", torch.float16),
        "autocast": lambda: number_cases.autocast(rank, "cuda"),
        "a scaler": lambda: number_cases.scaler(rank, "cuda"),
        "channels last": lambda: number_cases.channels_last(rank, "cuda"),
        "compiled, sternway": lambda: number_cases.compiled(rank, "cuda", "sternway", "inductor"),
        "compiled, inductor": lambda: number_cases.compiled(rank, "cuda", "inductor"),
    }
    for name, case in cases.items():
        with said(rank, name):
            case()


def test_numbers() -> None:
    on_small_gpus(2, run_numbers)


def test_dropout_does_not_depend_on_schedule_or_ranks() -> None:
    found = processes().SimpleQueue()
    for ranks, name in ((4, "1f1b"), (2, "zb-v")):
        on_small_gpus(ranks, number_cases.dropout, ranks, "cuda", name, found)
    grads: dict[int, list[Any]] = {}
    while not found.empty():
        _, _, stage, grad = found.get()
        grads.setdefault(stage, []).append(torch.tensor(grad))
    for first, second in grads.values():
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


def steps_in_a_row(rank: int, ranks: int, folder: str) -> None:
    with said(rank, "the first rank runs ahead"):
        run_ahead(rank, ranks, folder)
    with said(rank, "optimizer steps on trial"):
        run_optimizer(rank, ranks)
    with said(rank, "counts, and values that lead to nothing"):
        run_looks(rank, ranks)
    with said(rank, "plans that change"):
        run_auto(rank, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_in_a_row(ranks: int, tmp_path: Path) -> None:
    on_small_gpus(ranks, steps_in_a_row, ranks, str(tmp_path))
