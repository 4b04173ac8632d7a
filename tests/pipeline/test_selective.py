"""Blocks that are recomputed selectively: products are kept, and what is cheap is done again as it was."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway import schedule
from sternway._torch.memory import OperationCounter
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.build._partition import lay_out
from sternway.pipeline.build._room import Room, rooms
from sternway.schedule import Schedule, Share

DIM, COUNT = 32, 4
Entry = int | tuple[int, float] | tuple[int, float, float]


def plan_of(name: str, *entries: Entry, ranks: int = 2) -> Schedule:
    return replace(schedule.make(name, ranks=ranks, microbatches=COUNT), recompute=entries)


class Gated(nn.Module):
    """As in a Llama: a norm by the root mean square, rotated queries and keys, and a gated MLP."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up, self.down = nn.Linear(dim, 48), nn.Linear(dim, 48), nn.Linear(48, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        angle = torch.arange(length)[:, None] * torch.linspace(1, 0.1, dim // 2)
        q, k = (each * angle.cos() + each.flip(-1) * angle.sin() for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def made(kind: str, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(DIM, count) if kind == "gpt" else nn.Sequential(*(Gated() for _ in range(count)))


def batch(rows: int = 2 * COUNT) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 16, DIM)


local = partial(Pipeline, loss_fn=F.mse_loss, ranks=2)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("kind", ["gpt", "gated"])
def test_gradients_are_those_of_one_process(name: str, kind: str) -> None:
    plan = plan_of(name, (0, 0, 1), (1, 0.5, 0.5))
    model, alone, x = made(kind), made(kind), batch()
    pipe = local(model, schedule=plan, transport=LocalTransport())
    pipe.step(x, target=x)
    F.mse_loss(alone(x), x).backward()
    assert_same_grads(model, alone)
    assert any("forward" in vars(block) for block in model)
    torch.testing.assert_close(pipe.evaluate(x, target=x).loss, F.mse_loss(alone(x), x))


def test_no_product_is_done_again() -> None:
    """The operations of a step are those of one without recomputation; a block that runs again does its own twice."""
    flops, x = {}, batch()
    for entries in ((), ((0, 0.0, 1.0), (1, 0.0, 1.0)), (0, 1)):
        pipe = local(made("gpt"), schedule=plan_of("1f1b", *entries), transport=LocalTransport())
        with OperationCounter() as counter:
            pipe.step(x, target=x)
        flops[entries] = counter.flops
    plain, selective, whole = flops.values()
    assert plain == selective < whole


def test_the_first_blocks_are_whole_and_the_next_selective() -> None:
    model = made("gpt", 8)
    local(model, schedule=plan_of("1f1b", (0, 0.25, 0.5)), transport=LocalTransport(), cuts=["4"])
    forwards = [vars(block).get("forward") for block in model]
    assert [None if each is None else each.selective for each in forwards] == [False, True, True, *[None] * 5]


class Noisy(nn.Module):
    """Dropout in attention, whose result is then not kept, and after it; a layer that Python may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.extra = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.runs = SimpleNamespace(count=0)  # not a list: when it runs again, it finds that as it was

    def forward(self, x: Tensor) -> Tensor:
        self.runs.count += 1
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        y = F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.5)
        if random.random() < 0.5:
            y = y + F.dropout(self.extra(y).mul_(2).relu_(), 0.2)
        return x + y


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_random_numbers_are_the_same_again(name: str) -> None:
    x, grads = batch(), []
    for entries in ((), ((0, 0.0, 1.0), (1, 0.0, 1.0))):
        torch.manual_seed(3)
        model = nn.Sequential(*(Noisy() for _ in range(4)))
        pipe = local(model, schedule=plan_of(name, *entries), transport=LocalTransport(), cuts=["2"], sample=x[:2])
        for block in model:
            block.runs.count = 0
        torch.manual_seed(4)
        random.seed(5)
        pipe.step(x, target=x)
        grads.append([parameter.grad for parameter in model.parameters()])
        assert [block.runs.count for block in model] == [2 * COUNT if entries else COUNT] * 4
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Changing(nn.Module):
    """Changes the result of a product in place, and a buffer in every call."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(DIM, DIM, bias=bias), nn.Linear(DIM, DIM, bias=bias)
        self.register_buffer("factor", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.linear(x).mul_(self.factor.clone()), inplace=True)
        self.factor.mul_(0.5)
        return x + self.last(y).sin_()


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_changed_in_place(bias: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Changing(bias) for _ in range(4))), batch()
    alone = copy.deepcopy(model)
    pipe = local(model, schedule=plan_of("zb-h1", (0, 0, 1), (1, 0, 1)), transport=LocalTransport())
    for _ in range(2):
        pipe.step(x, target=x)
        for rows in x.chunk(COUNT):
            (F.mse_loss(alone(rows), rows) / COUNT).backward()
    assert_same_grads(model, alone)
    for mine, other in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + self.linear(F.gelu(self.linear(self.norm(x)))).float()


@pytest.mark.parametrize("around", [False, True])
def test_autocast(around: bool) -> None:
    """Inside of blocks, or around the step: then the second run casts weights that the first found cast."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*((made("gpt", 1)[0] if around else Cast()) for _ in range(4))), batch()
    grads = []
    for entries in ((), ((0, 0.0, 1.0), (1, 0.0, 1.0))):
        copied = copy.deepcopy(model)
        pipe = local(copied, schedule=plan_of("1f1b", *entries), transport=LocalTransport())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
            pipe.step(x, target=x)
        grads.append([parameter.grad for parameter in copied.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_cannot_be_selective_is_refused() -> None:
    stages = {0: nn.Linear(DIM, DIM), 1: nn.Linear(DIM, DIM)}
    with pytest.raises(PipelineError, match=r"as a whole, not in part; got 0 of stage 1, 1 selectively"):
        local(stages, schedule=plan_of("1f1b", (1, 0, 1)), transport=LocalTransport())
    for bad in ((0, 0.5, 0.75), (0, 0, 0), (0, -0.5, 1.0), (0, 0, True), (0, 0, 0.5, 0.5), (0, float("nan"), 0.5)):
        with pytest.raises(ScheduleError, match=r"or \(stage, share, share selectively\), with shares up to 1"):
            plan_of("1f1b", bad)


Todo = list[tuple[Schedule, list[str], list[int]]]


def weighed(kind: str, stages: int) -> tuple[Room, list[str]]:
    x, model = batch(2), made(kind)
    layout = lay_out(model, x, wanted=stages)
    way = layout.balanced([1.0] * len(model), stages)
    (room,) = rooms(model, layout, [way], 0, x, x, F.mse_loss)
    return room, [layout.names[start] for start in way[1:]]


def run_as_told(rank: int, kind: str, todo: Todo) -> None:
    x, alone = batch(), made(kind)
    F.mse_loss(alone(x), x).backward()
    reference = dict(alone.named_parameters())
    for plan, cuts, told in todo:
        pipe = Pipeline(made(kind), schedule=plan, cuts=cuts, loss_fn=F.mse_loss)
        pipe.step(x, target=x)  # now there are gradients
        with OperationCounter() as counter:
            pipe.step(x, target=x)  # now it knows what was there before
            for parameter in pipe.parameters():
                parameter.grad.zero_()
            before = counter.peak = counter.now
            pipe.step(x, target=x)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)
        assert counter.peak - before == pytest.approx(told[rank], rel=0.03), (rank, plan.name, plan.recompute)
        pipe.close()


@pytest.mark.parametrize("kind", ["gpt", "gated"])
def test_two_processes_hold_as_much_as_is_told(kind: str) -> None:
    todo, found = [], {stages: weighed(kind, stages) for stages in ((2, 4) if kind == "gpt" else (2,))}
    for name, entries in (
        ("1f1b", ((0, 0.0, 1.0), (1, 0.0, 1.0))),
        ("zb-h1", ((0, 0.5, 0.5), (1, 0.0, 0.5))),
        ("zb-v", ((0, 0.0, 1.0), (1, 0.0, 1.0), 3)),
    ):
        plan = plan_of(name, *entries)
        if plan.num_stages in found:
            room, cuts = found[plan.num_stages]
            todo.append((plan, cuts, [each.activations + each.working for each in room.ranks(plan)]))
            if name == "1f1b":  # in the others, what I leaves for W is as much as ever
                least, some, most = (
                    room.peak(replace(plan, recompute=each)) for each in (room.everything, entries, ())
                )
                assert least < some < most
    on_ranks(2, run_as_told, kind, todo)


def test_a_plan_says_so() -> None:
    plan = plan_of("1f1b", (1, 0.5, 0.25), (0, 0, 1))
    assert plan.recompute == ((0, 0.0, 1.0), (1, 0.5, 0.25))
    assert plan.shares == {0: Share(0.0, 1.0), 1: Share(0.5, 0.25)}
    assert schedule.from_json(plan.to_json()) == plan
    assert "recomputed: 100% of 0 selectively, 50% of 1 and 25% selectively" in repr(plan)
    assert "B0r" in plan.simulate().draw()
