"""``Pipeline(…, cuda_graphs=True)``: what needs no GPU, and on one, the gradients of one process."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from nccl_cases import CLOSE, DIM, batch, blocks, said
from searches import searches_at_once
from small_gpus import on_small_gpus
from sternway import saved, schedule
from sternway._torch.cuda_graphs import all_modules, held_tensors
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.step._captured import CapturedStage, in_flight


@pytest.mark.parametrize("name", schedule.names())
def test_what_is_in_flight_is_what_the_order_says(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=4)
    for stage, rank in enumerate(plan.stage_ranks()):
        flying: set[int] = set()
        most = 0
        for step in plan.actions[rank]:
            for action in step.actions:
                if action.stage == stage:
                    (flying.add if action.op == "F" else flying.discard if action.op in "WB" else int)(
                        action.microbatch
                    )
                    most = max(most, len(flying))
        assert in_flight(plan, stage) == most
        assert 1 <= most <= 4


def test_refused_on_a_cpu_and_with_saved() -> None:
    stages = {index: nn.Linear(2, 2) for index in range(2)}
    arguments: dict[str, Any] = {"schedule": "1f1b", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    with pytest.raises(PipelineError, match=r"cuda_graphs=True needs stages on a CUDA device; got stages on cpu"):
        Pipeline(stages, transport=LocalTransport(), cuda_graphs=True, **arguments)
    with pytest.raises(PipelineError, match="cuda_graphs must be True or False; got int 2"):
        Pipeline(stages, transport=LocalTransport(), cuda_graphs=2, **arguments)


class Net(nn.Module):
    """A whole model with glue between its blocks, dropout and a table that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, DIM)
        self.blocks = nn.ModuleList(gpt(DIM, 1, heads=2) for _ in range(4))
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.2)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.table(ids) * scale
        for block in self.blocks:
            x = self.drop(block(x))
        return self.norm(x) @ self.table.weight.t()


def logits_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def assert_captured(pipe: Pipeline) -> None:
    for stage in pipe.stages.values():
        assert stage.captured is not None
        assert stage.captured.refusals == ()
        assert stage.captured.sets >= 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
def test_stages_in_one_process(name: str) -> None:
    torch.manual_seed(0)
    plan = schedule.make(name, ranks=2, microbatches=4)
    stages = {index: gpt(64, 1).cuda() for index in range(plan.num_stages)}
    eager = copy.deepcopy(stages)
    x, target = (torch.randn(8, 16, 64, device="cuda") for _ in range(2))
    pipe, other = (
        Pipeline(each, schedule=plan, loss_fn=F.mse_loss, transport=LocalTransport("cuda"), cuda_graphs=graphs)
        for each, graphs in ((stages, True), (eager, False))
    )
    for number in range(3):
        mine, theirs = pipe.step(x, target=target), other.step(x, target=target)
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        for index, module in stages.items():
            assert_same_grads(module, eager[index], rtol=1e-4, atol=1e-5)
            if number == 1:
                module.zero_grad()
                eager[index].zero_grad()
    assert_captured(pipe)
    assert {index: stage.captured.sets for index, stage in pipe.stages.items()} == {
        index: in_flight(plan, index) for index in stages
    }
    torch.testing.assert_close(pipe.evaluate(x, target=target).loss, other.evaluate(x, target=target).loss)


@pytest.mark.parametrize(
    ("name", "cuts"), [("1f1b", ["blocks.2"]), ("zb-v", ["blocks.1", "blocks.2", "blocks.3"])], ids=["1f1b", "zb-v"]
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
def test_a_whole_model_in_one_process(name: str, cuts: list[str]) -> None:
    torch.manual_seed(0)
    model = Net().cuda()
    other = copy.deepcopy(model)
    ids = torch.randint(40, (10, 6), device="cuda")  # the last microbatch is smaller
    pipes = [
        Pipeline(
            each, schedule=name, n_microbatches=4, ranks=2, loss_fn=logits_loss, sample=ids[:3], cuts=cuts,
            transport=LocalTransport("cuda"), cuda_graphs=graphs,
        )
        for each, graphs in ((model, True), (other, False))
    ]  # fmt: skip
    optimizers = [torch.optim.AdamW(pipe.parameters(), 1e-3) for pipe in pipes]
    for _ in range(4):
        losses = [pipe.step(ids, target=ids).loss for pipe in pipes]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
        theirs = dict(pipes[1].named_parameters())
        for key, parameter in pipes[0].named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=1e-3, atol=1e-5)
        for pipe, optimizer in zip(pipes, optimizers, strict=True):
            pipe.optimizer_step(optimizer, max_norm=1.0)
    for pipe in pipes:
        pipe.settle()
    assert_captured(pipes[0])


def test_saved_and_graphs_exclude_each_other() -> None:
    from sternway.pipeline.build._checks import check_cuda_graphs

    check_cuda_graphs(True, torch.device("cuda"), None)
    with pytest.raises(PipelineError, match=r"cannot have saved=.*got saved="):
        check_cuda_graphs(True, torch.device("cuda"), saved.keep())


def run_captured(rank: int, ranks: int) -> None:
    """Named schedules and the tuner's, with optimizer steps on trial; equal to one process."""
    for name in ("zb-h1", "auto"):
        with said(rank, name):
            model, reference = (nn.Sequential(*blocks(2 * ranks)) for _ in range(2))
            torch.manual_seed(1)
            x, target = batch(4 * ranks)
            with searches_at_once():
                pipe = Pipeline(
                    model, schedule=name, n_microbatches=2 * ranks, loss_fn=F.mse_loss, sample=x[:2], cuda_graphs=True
                )
            mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (pipe, reference))
            for number in range(4 if name != "auto" else 24):
                pipe.step(x, target=target, record=number % 2 == 0)
                F.mse_loss(reference(x), target).backward()
                for key, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, reference.get_parameter(key).grad, **CLOSE)
                pipe.optimizer_step(mine, max_norm=1e3)
                theirs.step()
                theirs.zero_grad()
            pipe.settle()
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter, reference.get_parameter(key), rtol=1e-3, atol=1e-4)
            assert_captured(pipe)
            pipe.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_two_small_gpus() -> None:
    on_small_gpus(2, run_captured, 2)


class Draws(Net):
    """Draws a number between the blocks."""

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(ids, scale * random.random())


class Scaled(Net):
    """A buffer that code between the blocks uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(ids) * self.gain


def first_stage(model: nn.Module, ids: Tensor) -> tuple[ModelPart, CapturedStage]:
    """The first of two stages, with what would make graphs of it, after a step."""
    pipe = Pipeline(
        model, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=logits_loss, sample=ids[:2], cuts=["blocks.2"],
        transport=LocalTransport(),
    )  # fmt: skip
    pipe.step(ids, target=ids)
    part = pipe.stages[0].module
    assert isinstance(part, ModelPart)
    return part, CapturedStage(0, part)


def test_numbers_of_python_that_a_replay_would_repeat() -> None:
    """They come from a seed, and the generator is put back, so that a look at it would not tell."""
    ids = torch.randint(40, (4, 3))
    _, captured = first_stage(Draws(), ids)
    with pytest.warns(UserWarning, match=r"stage 0 runs as it is, without CUDA graphs: .* random numbers of Python"):
        captured(ids)
    assert len(captured.refusals) == 1
    _, plain = first_stage(Net(), ids)
    with pytest.warns(UserWarning, match="not all on one GPU"):  # which is all that it lacks here
        plain(ids)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
def test_numbers_of_python_differ_from_step_to_step() -> None:
    torch.manual_seed(0)
    model = Draws().cuda()
    other = copy.deepcopy(model)
    ids = torch.randint(40, (8, 6), device="cuda")
    pipes = [
        Pipeline(
            each, schedule="1f1b", n_microbatches=4, ranks=2, loss_fn=logits_loss, sample=ids[:2], cuts=["blocks.2"],
            transport=LocalTransport("cuda"), cuda_graphs=graphs,
        )
        for each, graphs in ((model, True), (other, False))
    ]  # fmt: skip
    losses = [[pipe.step(ids, target=ids).loss for _ in range(4)] for pipe in pipes]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    for stage in pipes[0].stages.values():
        assert any("random numbers of Python" in reason for reason in stage.captured.refusals)


def test_graphs_are_asked_for_the_buffers_that_the_model_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs none of the code that would look for them."""
    ids, model = torch.randint(40, (4, 3)), Scaled()
    part, captured = first_stage(model, ids)
    found: list[list[Tensor]] = []

    def noted(*args: Any) -> Any:
        found.append(held_tensors(all_modules(part)))
        return part(*args), None

    monkeypatch.setattr(captured, "_captured", noted)
    before = model.gain
    captured(ids)
    model.gain = torch.full((), 2.0)
    captured(ids)
    for held, gain in zip(found, (before, model.gain), strict=True):
        assert any(tensor is gain for tensor in held)
