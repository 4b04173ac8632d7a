"""Any model, schedule and transport against one process: the same loss and the same gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads
from gloo import on_ranks
from sternway import schedule
from sternway._tree import leaves
from sternway.errors import ScheduleError
from sternway.pipeline import LocalTransport, Pipeline

DIM = 4
BODIES = ("linear", "norm", "gate", "frozen", "checkpoint", "sine", "deep")
OUTPUTS = ("tensor", "pair", "dict", "parcel")


@dataclass
class Parcel:
    x: Tensor
    rows: Tensor
    note: str


class Part(nn.Module):
    """Adds up all floats that arrive, in whatever containers, and sends the result on in a container of its own."""

    def __init__(self, body: str, output: str) -> None:
        super().__init__()
        self.body, self.output = body, output
        self.layer: nn.Module = nn.Identity()
        if body in ("linear", "gate", "frozen", "checkpoint"):
            self.layer = nn.Linear(DIM, DIM, bias=body != "gate")
        elif body == "norm":
            self.layer = nn.LayerNorm(DIM)
        elif body == "deep":
            self.layer = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.Tanh(), nn.Linear(2 * DIM, DIM))
        self.layer.requires_grad_(body != "frozen")

    def compute(self, x: Tensor) -> Tensor:
        return x * self.layer(x).tanh() if self.body == "gate" else self.layer(x).sin()

    def forward(self, *arrived: Any) -> Any:
        tensors = [leaf for leaf in leaves(arrived) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        x = torch.stack(tensors).sum(0)
        x = checkpoint(self.compute, x, use_reentrant=False) if self.body == "checkpoint" else self.compute(x)
        if self.output == "pair":
            return x, x.square()
        if self.output == "dict":
            return {"main": x, "more": [x.detach(), None, 3], "sum": x + 1}
        return Parcel(x, torch.arange(len(x)), "text") if self.output == "parcel" else x


@dataclass(frozen=True)
class Case:
    """One model, one schedule, and the rows of the batches of its steps."""

    name: str
    ranks: int
    microbatches: int
    parts: tuple[tuple[str, str], ...]
    rows: tuple[int, ...]

    def plan(self) -> schedule.Schedule:
        return schedule.make(self.name, ranks=self.ranks, microbatches=self.microbatches)

    def model(self, num_stages: int) -> list[nn.Module]:
        torch.manual_seed(0)
        kinds = [self.parts[index % len(self.parts)] for index in range(num_stages)]
        kinds[-1] = kinds[-1][0], "tensor"
        return [Part(*kind).double() for kind in kinds]


@st.composite
def cases(draw: st.DrawFn, ranks: st.SearchStrategy[int]) -> Case:
    microbatches = draw(st.integers(1, 6))
    case = Case(
        draw(st.sampled_from(schedule.names())),
        draw(ranks),
        microbatches,
        tuple(draw(st.lists(st.tuples(st.sampled_from(BODIES), st.sampled_from(OUTPUTS)), min_size=1, max_size=6))),
        tuple(draw(st.lists(st.integers(microbatches, 3 * microbatches), min_size=1, max_size=3))),
    )
    try:
        case.plan()
    except ScheduleError:
        reject()  # not for these numbers
    return case


def assert_equals_one_process(case: Case, rank: int | None) -> None:
    """Train with the stages of one rank over gloo, or with those of all ranks in this process."""
    plan = case.plan()
    stages = case.model(plan.num_stages)
    reference = copy.deepcopy(stages)
    here = plan.placement[rank] if rank is not None else range(plan.num_stages)
    transport = LocalTransport() if rank is None else None
    pipe = Pipeline({i: stages[i] for i in here}, schedule=plan, loss_fn=F.mse_loss, transport=transport)
    torch.manual_seed(1)
    for rows in case.rows:
        x, target = torch.randn(rows, DIM).double(), torch.randn(rows, DIM).double()
        result = pipe.step(x, target=target, loss_everywhere=True)
        expected: Any = x
        for stage in reference:
            expected = stage(*expected) if type(expected) is tuple else stage(expected)
        loss = F.mse_loss(expected, target)
        if loss.requires_grad:
            loss.backward()
        torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-6, atol=1e-9)
        for index in here:
            assert_same_grads(stages[index], reference[index], rtol=1e-9, atol=1e-12)
    pipe.close()


@settings(max_examples=60, deadline=None)
@given(cases(st.integers(1, 4)))
def test_in_one_process(case: Case) -> None:
    assert_equals_one_process(case, None)


def _all(rank: int, some: list[Case]) -> None:
    for case in some:
        assert_equals_one_process(case, rank)


@settings(max_examples=3, deadline=None)
@given(st.lists(cases(st.just(2)), min_size=3, max_size=3))
def test_on_two_gloo_ranks(some: list[Case]) -> None:
    on_ranks(2, _all, some)
