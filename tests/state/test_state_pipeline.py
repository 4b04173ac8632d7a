"""Hooks in the stages of a pipeline, one state a stage, several microbatches in flight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway import schedule
from sternway.pipeline import LocalTransport, Pipeline
from sternway.state import BackwardState
from ways import WAYS, run


class Stage(nn.Module):
    """Two layers, and between them a hook that knows which microbatch comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state, self.seen, self.calls = BackwardState(), [], 0

    def note(self, grad: Tensor) -> None:
        self.seen.append((self.state.microbatch, grad.norm()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.state.on_grad(self.first(x).tanh(), self.note)).tanh()


class Numbered(nn.Module):
    """Runs a compiled stage, and fills its state after each forward: outside of what is compiled."""

    def __init__(self, stage: Stage, way: str) -> None:
        super().__init__()
        self.stage, self.compiled = stage, run(stage.forward, way)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.compiled(x)
        self.stage.state.microbatch = self.stage.calls
        self.stage.calls += 1
        return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_each_microbatch_finds_its_own_values(way: str, name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=4)
    stages = [Stage() for _ in range(plan.num_stages)]
    reference = nn.Sequential(*copy.deepcopy(stages))
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    pipe = Pipeline(
        {index: Numbered(stage, way) for index, stage in enumerate(stages)},
        schedule=plan,
        loss_fn=F.mse_loss,
        transport=LocalTransport(),
    )
    pipe.step(x, target=target)
    for index, (part, goal) in enumerate(zip(x.chunk(4), target.chunk(4), strict=True)):
        loss = F.mse_loss(reference(part), goal) / 4
        for stage in reference:
            stage.state.microbatch = index
        loss.backward()
    assert_same_grads(nn.Sequential(*stages), reference, rtol=1e-4, atol=1e-6)
    for stage, theirs in zip(stages, reference, strict=True):
        assert sorted(number for number, _ in stage.seen) == [0, 1, 2, 3]
        torch.testing.assert_close(dict(stage.seen), dict(theirs.seen))
