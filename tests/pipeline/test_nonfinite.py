"""Gradients that are not finite: skipped or raised by all ranks, undone to the bit, and traced to a module."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway.errors import NonfiniteError, PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM = 4


class Bad(nn.Module):
    """Passes on what it gets, unless it is to make infinities forward, or no numbers backward."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "forward":
            return x / torch.zeros(())
        if self.way == "backward":
            return x + torch.sqrt(x * 0)  # whose derivative is 0 / 0
        return x


def stages(*bad: tuple[int, str]) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    ways = dict(bad)
    return {i: nn.Sequential(nn.Linear(DIM, DIM), Always(ways.get(i, ""))) for i in range(3)}


class Always(nn.Module):
    """Spoils while it is ``on``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.on = way, False
        self.layer = nn.Linear(DIM, DIM)
        self.spoil = Bad()

    def forward(self, x: Tensor) -> Tensor:
        self.spoil.way = self.way if self.on else ""
        return self.spoil(self.layer(x))


def pipe_of(modules: dict[int, nn.Module], **options: Any) -> Pipeline:
    return Pipeline(modules, **{"schedule": "1f1b", "n_microbatches": 2, "loss_fn": F.mse_loss} | options)


def local(modules: dict[int, nn.Module], **options: Any) -> Pipeline:
    return pipe_of(modules, ranks=3, transport=LocalTransport(), **options)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, DIM), torch.randn(4, DIM)


WAYS = [("forward", r"numbers in the output of 1\.spoil"), ("backward", r"the gradient of the input of 1\.spoil")]


@pytest.mark.parametrize(("way", "origin"), WAYS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_step_says_which_module(way: str, origin: str, schedule: str) -> None:
    modules = stages((1, way))
    pipe = local(modules, schedule=schedule)
    x, target = batch()
    assert pipe.step(x, target=target, nonfinite="skip").nonfinite is None
    pipe.step(x, target=target)
    modules[1][1].on = True
    result = pipe.step(x, target=target, nonfinite="skip")
    assert "(rank 1, stage 1)" in result.nonfinite
    assert "1.spoil" in result.nonfinite
    assert all(p.grad is None for p in pipe.parameters())
    assert pipe.skipped == 1
    with pytest.raises(
        NonfiniteError, match=rf"the gradients of step 3 are not finite; got .*{origin} \(rank 1, stage 1\)"
    ):
        pipe.step(x, target=target, nonfinite="raise")
    modules[1][1].on = False
    assert pipe.step(x, target=target, nonfinite="raise").nonfinite is None  # the pipeline goes on


def test_the_loss() -> None:
    pipe = local(stages(), loss_fn=lambda y, t: F.mse_loss(y, t) * float("inf"))
    x, target = batch()
    with pytest.raises(NonfiniteError, match=r"the value of the loss \(rank 2, stage 2\)"):
        pipe.step(x, target=target, nonfinite="raise")


def train(pipe: Pipeline, modules: dict[int, nn.Module], bad: set[int], trial: bool) -> list[Tensor]:
    """Six AdamW steps with clipping, some with bad gradients, in both ways of taking a step."""
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    torch.manual_seed(1)
    for step in range(6):
        x, target = batch()
        modules[1][1].on = step in bad
        if trial:
            pipe.step(x, target=target, record=False)
            pipe.optimizer_step(optimizer, max_norm=0.5, nonfinite="skip")
        else:
            pipe.step(x, target=target, record=False, nonfinite="skip")
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    pipe.settle()
    return [p.detach().clone() for p in pipe.parameters()]


@pytest.mark.parametrize("bad", [set(), {0}, {2, 3}, {5}])
def test_steps_on_trial_end_as_those_that_waited(bad: set[int]) -> None:
    first, second = stages((1, "forward")), stages((1, "forward"))
    waited = train(local(first), first, bad, trial=False)
    pipe = local(second)
    tried = train(pipe, second, bad, trial=True)
    assert pipe.skipped == len(bad)
    for mine, theirs in zip(tried, waited, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_that_is_rolled_back_leaves_nothing() -> None:
    modules = stages((1, "forward"))
    pipe = local(modules)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    x, target = batch()
    pipe.step(x, target=target)
    pipe.optimizer_step(optimizer)
    pipe.settle()
    before = copy.deepcopy(pipe.state_dict()), copy.deepcopy(optimizer.state_dict())
    modules[1][1].on = True
    pipe.step(x, target=target)
    pipe.optimizer_step(optimizer)
    with pytest.raises(NonfiniteError, match=r"output of 1\.spoil"):
        pipe.settle()
    for name, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1]["state"][index][key])
    modules[1][1].on = False
    pipe.step(x, target=target)  # and goes on
    pipe.optimizer_step(optimizer)
    pipe.settle()


def _on_ranks(rank: int, folder: str) -> None:
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    modules = stages((1, "forward"))
    pipe = pipe_of({rank: modules[rank]}, n_microbatches=2, reports=folder)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    pipe.step(x, target=target)
    pipe.optimizer_step(optimizer, max_norm=1e-3)
    modules[rank][1].on = True
    pipe.step(x, target=target)
    before = [p.detach().clone() for p in pipe.parameters()]
    pipe.optimizer_step(optimizer, nonfinite="skip")
    modules[rank][1].on = False
    y, goal = torch.randn(6, DIM), torch.randn(6, DIM)  # other shapes, after the bad step was looked into
    pipe.evaluate(y, target=goal)
    for parameter, old in zip(pipe.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
    assert pipe.skipped == 1
    modules[rank][1].on = True
    pipe.step(x, target=target)
    pipe.optimizer_step(optimizer)
    with pytest.raises(
        NonfiniteError, match=r"step 2 are not finite; got .*output of 1\.spoil \(rank 1, stage 1\)"
    ) as raised:
        pipe.step(x, target=target)
    report = json.loads(Path(raised.value.__notes__[0].split(": ", 1)[1]).read_text())
    assert report["error"] == f"NonfiniteError: {raised.value}"
    assert [event["action"] for event in report["timeline"]] == [str(action) for action in pipe.schedule.actions[rank]]
    modules[rank][1].on = False
    assert pipe.step(x, target=target, nonfinite="raise").nonfinite is None
    pipe.close()


def test_three_processes_agree(tmp_path: Path) -> None:
    on_ranks(3, _on_ranks, str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "ignore"}, 'nonfinite must be "raise" or "skip"; got \'ignore\''),
        ({"nonfinite": None}, 'nonfinite must be "raise" or "skip"; got None'),
        ({"max_norm": 0}, "max_norm must be a positive number; got 0"),
        ({"max_norm": "1"}, "max_norm must be a positive number; got '1'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    pipe = local(stages())
    with pytest.raises(PipelineError, match=message):
        pipe.optimizer_step(torch.optim.SGD(pipe.parameters(), 0.1), **options)
    with pytest.raises(PipelineError, match=r"optimizer must be a torch\.optim\.Optimizer; got str"):
        pipe.optimizer_step("adam")
