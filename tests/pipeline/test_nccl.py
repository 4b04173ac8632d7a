"""Real NCCL between small GPUs: gradients equal one process's on every schedule, and no step waits on the host.

A start of processes costs seconds, so each test runs much in one.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from compare import assert_same_grads
from nccl_cases import CLOSE, DIM, batch, blocks, no_waits, said
from small_gpus import Init, on_small_gpus
from sternway import schedule
from sternway.demo import GPT
from sternway.errors import PipelineError
from sternway.pipeline import DistTransport, Pipeline, WithSkips

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


def compare(pipe: Pipeline, held: dict[int, nn.Module], reference: nn.Sequential, x: Tensor, target: Tensor) -> None:
    """A step must give the gradients of one process."""
    result = pipe.step(x, target=target, loss_everywhere=True, record=False)
    loss = F.mse_loss(reference(x), target)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-4, atol=1e-6)
    for index, module in held.items():
        assert_same_grads(module, reference[index], **CLOSE)


def run_schedule(rank: int, ranks: int, name: str) -> None:
    plan = schedule.make(name, ranks=ranks, microbatches=2 * ranks)
    mine, reference = blocks(plan.num_stages), nn.Sequential(*blocks(plan.num_stages))
    held = {index: mine[index] for index in plan.placement[rank]}
    pipe = Pipeline(held, schedule=plan, loss_fn=F.mse_loss)
    assert pipe.transport.device == torch.device("cuda", 0)
    torch.manual_seed(1)
    rows = 4 * ranks
    compare(pipe, held, reference, *batch(rows))
    x, target = batch(rows)
    with no_waits():
        results = [pipe.step(x, target=target, record=record) for record in (False, True)]
    for _ in range(2):
        loss = F.mse_loss(reference(x), target)
        loss.backward()
    result = results[-1]
    last = plan.num_stages - 1
    assert (result.loss is None) == (last not in held)
    if result.loss is not None:
        assert result.loss.is_cuda
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-4, atol=1e-6)
    for index, module in held.items():
        assert_same_grads(module, reference[index], **CLOSE)
    for length, size in ((4, rows), (8, rows), (8, rows - 1)):  # other shapes, and back, and microbatches of two sizes
        compare(pipe, held, reference, *batch(size, length))
    timeline = result.timeline
    assert [[event.action for event in r] for r in timeline.events] == [list(r) for r in plan.actions]
    assert all(a.end <= b.start + 1e-5 for events in timeline.events for a, b in pairwise(events))
    outputs = pipe.evaluate(x, target=target, loss_everywhere=True)
    with torch.no_grad():
        expected = reference(x)
    torch.testing.assert_close(outputs.loss, F.mse_loss(expected, target), rtol=1e-4, atol=1e-6)
    if outputs.outputs is not None:
        torch.testing.assert_close(outputs.outputs, expected, rtol=1e-3, atol=1e-4)
    pipe.close()


def run_auto(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(gpt(DIM, 1, heads=2) for _ in range(2 * ranks))).cuda()
    reference = copy.deepcopy(model)
    x, target = batch(4 * ranks)
    pipe = Pipeline(
        model, schedule="auto", n_microbatches=2 * ranks, loss_fn=F.mse_loss, sample=x[:2], sample_target=target[:2]
    )
    assert pipe.costs.comm > 0
    for _ in range(3):
        result = pipe.step(x, target=target, loss_everywhere=True, record=False)
        loss = F.mse_loss(reference(x), target)
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-4, atol=1e-6)
    whole = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad, **CLOSE)
    pipe.close()


def schedules(rank: int, ranks: int, names: list[str]) -> None:
    for name in names:
        with said(rank, f"{ranks} ranks, {name}"):
            if name == "auto":
                run_auto(rank, ranks)
            else:
                run_schedule(rank, ranks, name)


@pytest.mark.parametrize("init", ["eager", "lazy"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule(ranks: int, init: Init) -> None:
    on_small_gpus(ranks, schedules, ranks, [*schedule.names(), "auto"], init=init)


@pytest.mark.parametrize("init", ["eager", "lazy"])
def test_eight_ranks(init: Init) -> None:
    on_small_gpus(8, schedules, 8, ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "auto"], init=init)


@pytest.mark.parametrize("init", ["both", "torchrun"])
def test_other_ways_to_initialize(init: Init) -> None:
    on_small_gpus(2, schedules, 2, ["zb-v", "auto"], init=init)


# What may travel


class Tree(nn.Module):
    """Returns a dictionary of tensors of several types, a number and a constant, and a skip."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.layer, self.skips = nn.Linear(DIM, DIM), skips

    def forward(self, parcel: Any, early: Tensor | None = None) -> Any:
        x = parcel["x"] if isinstance(parcel, dict) else parcel
        y = self.layer(x)
        if early is not None:
            y = y + early
        made = {
            "x": y,
            "half": y.half().detach(),
            "ids": torch.arange(3, device=y.device, dtype=torch.int16),
            "mask": y.detach() > 0,
            "none": None,
            "empty": y[:0],
            "scalar": y.sum(),
        }
        return WithSkips(made, {"early": y * 2}) if self.skips else made


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, parcel: dict[str, Any], early: Tensor) -> Tensor:
        assert parcel["ids"].tolist() == [0, 1, 2]
        assert parcel["mask"].dtype == torch.bool
        return self.layer(parcel["x"]) * parcel["mask"] + early + parcel["half"].float() + parcel["scalar"]


def run_trees(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    plan = schedule.make("zb-v", ranks=ranks, microbatches=4)
    count = plan.num_stages
    stages = nn.ModuleList([*(Tree(skips=index == 0) for index in range(count - 1)), Head()]).cuda()
    reference = copy.deepcopy(stages)
    held = {index: stages[index] for index in plan.placement[rank]}
    pipe = Pipeline(held, schedule=plan, loss_fn=F.mse_loss, skips={"early": (0, count - 1)})
    for _ in range(3):
        x, target = torch.randn(8, DIM, device="cuda"), torch.randn(8, DIM, device="cuda")
        pipe.step(x, target=target, record=False)
        for part, goal in zip(x.chunk(4), target.chunk(4), strict=True):
            first = reference[0](part)
            parcel = first.output
            for stage in reference[1:-1]:
                parcel = stage(parcel)
            (F.mse_loss(reference[-1](parcel, early=first.skips["early"]), goal) / 4).backward()
        for index, module in held.items():
            assert_same_grads(module, reference[index], rtol=1e-2, atol=1e-3)
    pipe.close()


class Variable(nn.Module):
    """Sends on as many rows as the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[: int(x[0, 0] > 0) + 1]


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(0, keepdim=True)


def run_dynamic(rank: int) -> None:
    torch.manual_seed(0)
    stages = nn.ModuleList([Variable(), Mean()]).cuda()
    reference = copy.deepcopy(stages)
    pipe = Pipeline({rank: stages[rank]}, schedule="zb-h1", n_microbatches=3, loss_fn=F.mse_loss, dynamic=True)
    for _ in range(3):
        x, target = torch.randn(9, DIM, device="cuda"), torch.randn(3, DIM, device="cuda")
        pipe.step(x, target=target, record=False)
        for part, goal in zip(x.chunk(3), target.chunk(3), strict=True):
            (F.mse_loss(reference[1](reference[0](part)), goal) / 3).backward()
        assert_same_grads(stages[rank], reference[rank], **CLOSE)
    pipe.close()


def run_tied(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    model, reference = (GPT(vocabulary=11, dim=DIM, heads=2, layers=4, length=6).cuda() for _ in range(2))
    for each in (model, reference):
        each.head.weight = each.tokens.weight
    reference.load_state_dict(model.state_dict())

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    tokens = torch.randint(0, 11, (8, 6), device="cuda")
    pipe = Pipeline(model, schedule="zb-h1", n_microbatches=4, loss_fn=loss)
    mine = torch.optim.AdamW(pipe.parameters(), 1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), 1e-3)
    for _ in range(3):
        result = pipe.step(tokens, target=tokens, loss_everywhere=True)
        norm = pipe.clip_grad_norm_(0.5)
        expected = loss(reference(tokens), tokens)
        expected.backward()
        torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), rtol=1e-3, atol=1e-4)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()


def run_copies(rank: int) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "pp"))
    which, place = rank // 2, rank % 2
    mine, reference = blocks(2), nn.Sequential(*blocks(2))
    pipe = Pipeline({place: mine[place]}, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss, mesh=mesh)
    torch.manual_seed(1)
    for _ in range(2):
        x, target = batch(8)
        pipe.step(x.chunk(2)[which], target=target.chunk(2)[which], record=False)
        F.mse_loss(reference(x), target).backward()
        assert_same_grads(mine[place], reference[place], **CLOSE)
        for module in (mine[place], reference):
            module.zero_grad()
    pipe.close()


def features(rank: int, ranks: int) -> None:
    with said(rank, "trees and skips"):
        run_trees(rank, ranks)
    with said(rank, "ties, clipping and an optimizer"):
        run_tied(rank, ranks)
    if ranks == 2:
        with said(rank, "shapes that depend on the data"):
            run_dynamic(rank)
        with said(rank, "stages in the wrong place"):
            wrong_places(rank)
    if ranks == 4:
        with said(rank, "two copies of two ranks"):
            run_copies(rank)


def wrong_places(rank: int) -> None:
    layer = nn.Linear(DIM, DIM)
    build = {"schedule": "1f1b", "n_microbatches": 2, "loss_fn": F.mse_loss}
    both = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM).cuda())
    with pytest.raises(PipelineError, match=r"stages of a rank must be on one device; got cpu and cuda:0"):
        Pipeline({rank: both if rank else layer.cuda()}, **build)
    with pytest.raises(PipelineError, match=r"must reach the device of the stages; got stages on cpu"):
        Pipeline({rank: nn.Linear(DIM, DIM)}, **build)
    with pytest.raises(PipelineError, match="must be on the device of the transport or mesh, cpu"):
        Pipeline({rank: nn.Linear(DIM, DIM).cuda()}, **build, transport=DistTransport(device="cpu"))


@pytest.mark.parametrize(("ranks", "init"), [(2, "eager"), (4, "eager"), (4, "lazy")])
def test_what_travels(ranks: int, init: Init) -> None:
    on_small_gpus(ranks, features, ranks, init=init)


def mixed_places(rank: int) -> None:
    layer = nn.Linear(DIM, DIM)
    build = {"schedule": "1f1b", "n_microbatches": 2, "loss_fn": F.mse_loss}
    with pytest.raises(PipelineError, match="same kind of device; got cpu on rank 1 and cuda on rank 0"):
        Pipeline({rank: layer if rank else layer.cuda()}, **build)
    cpu = Pipeline({rank: nn.Linear(DIM, DIM)}, **build)  # a GPU that is there need not be used
    cpu.step(torch.ones(4, DIM), target=torch.ones(4, DIM))
    assert cpu.transport.device == torch.device("cpu")
    cpu.close()
    no_parameters = nn.ReLU() if rank else nn.Linear(DIM, DIM).cuda()
    pipe = Pipeline({rank: no_parameters}, **build)
    pipe.step(torch.ones(4, DIM, device="cuda"), target=torch.ones(4, DIM, device="cuda"))
    assert pipe.transport.device == torch.device("cuda", 0)
    pipe.close()
    dist.barrier()


def test_stages_on_different_devices() -> None:
    on_small_gpus(2, mixed_places, init="both")
