"""A stage frees what it has sent: its backward starts at places in the graph, and gradients are as of one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from compiled import compiled
from gloo import on_ranks
from sternway import pipeline, schedule
from sternway._torch.memory import OperationCounter
from sternway.pipeline import LocalTransport, Pipeline, WithSkips
from sternway.pipeline.build._partition import split_model
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._roots import Root
from sternway.pipeline.step._stage import Stage

DIM, ROWS = 6, 8
SEEN: list[Tensor] = []  # gradients that hooks have seen


class Twice(torch.autograd.Function):
    """Its node belongs to C++: what Python holds of it keeps nothing alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.exp()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return first * x.cos() + second * x.exp()


class Middle(nn.Module):
    """The stage between two others; returns two tensors, of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.table = kind, nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return getattr(self, self.kind)(x, y)

    def plain(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y * self.table, y + x

    def input(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, x

    def only_input(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * self.table

    def parameter(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, self.table

    def views(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.t().contiguous().t(), y[:, 1:2].expand(-1, DIM)

    def in_place(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = y.view(-1)[: y.numel() // 2]
        z.mul_(2.0)
        return y, (y * 1).relu_()

    def same(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, y

    def saved(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.tanh(), y.softmax(-1)

    def function(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return Twice.apply(y)

    def unused(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, Twice.apply(y)[1].detach()

    def hooks(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.register_hook(lambda grad: grad * 3)
        z = Twice.apply(y)[0]
        z.register_hook(lambda grad: SEEN.append(grad.clone()))
        return y, z

    def retained(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.retain_grad()
        self.kept.append(y)
        return y, y * self.table


KINDS = [name for name in vars(Middle) if not name.startswith("_") and name != "forward"]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, both: tuple[Tensor, Tensor] | Tensor, other: Tensor | None = None) -> Tensor:
        one, two = both if other is None else (both, other)
        return self.linear(one) * two


def stages(kind: str) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), Middle(kind), Last()])


def plain_grads(alone: nn.ModuleList, x: Tensor, count: int) -> None:
    """The gradients of one process, microbatch by microbatch, as hooks see them in the pipeline."""
    for part in x.chunk(count):
        (F.mse_loss(alone[2](alone[1](alone[0](part))), part) / count).backward()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        *(("eager", kind) for kind in KINDS),
        *(("recomputed", kind) for kind in KINDS),
        *(("compiled", kind) for kind in ("plain", "input", "parameter", "views", "in_place", "same", "saved")),
    ],
)
def test_gradients_are_those_of_one_process(kind: str, name: str, how: str) -> None:
    ours, x = stages(kind), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(ours)
    plan = schedule.make(name, ranks=3, microbatches=4)
    if how == "recomputed":
        plan = replace(plan, recompute=(1,))
    held = dict(enumerate(ours))
    if how == "compiled":
        torch._dynamo.reset()
        held[1] = compiled(ours[1])
    pipe = Pipeline(held, schedule=plan, loss_fn=F.mse_loss, transport=LocalTransport())
    SEEN.clear()
    pipe.step(x, target=x)
    seen = [each.clone() for each in SEEN]
    SEEN.clear()
    plain_grads(alone, x, 4)
    assert_same_grads(ours, alone)
    if kind == "hooks" and how == "eager":
        assert len(seen) == 4
        torch.testing.assert_close(seen, SEEN)
    if kind == "retained" and how == "eager":
        assert len(ours[1].kept) == 4
        torch.testing.assert_close([y.grad for y in ours[1].kept], [y.grad for y in alone[1].kept])


class TwoWays(nn.Module):
    """Sends one tensor on two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> WithSkips:
        y = self.linear(x)
        return WithSkips(y, {"other": y})


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_one_tensor_on_two_channels(name: str) -> None:
    torch.manual_seed(0)
    ours, x = nn.ModuleList([TwoWays(), nn.Linear(DIM, DIM), Last()]), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(ours)
    pipe = Pipeline(
        dict(enumerate(ours)), schedule=schedule.make(name, ranks=3, microbatches=4), loss_fn=F.mse_loss,
        skips={"other": (0, 2)}, transport=LocalTransport(),
    )  # fmt: skip
    pipe.step(x, target=x)
    y = alone[0].linear(x)
    F.mse_loss(alone[2](alone[1](y), y), x).backward()
    assert_same_grads(ours, alone)


# What is held


def send(stage: Stage, number: int, x: Tensor) -> tuple[dict[str, Any], list[weakref.ref[torch.UntypedStorage]]]:
    """F of a microbatch: what is sent, and its memory, which is not held."""
    payloads = stage.forward(number, Microbatch((x,)), {}, keep_output=False)
    return payloads, [weakref.ref(t.untyped_storage()) for _, tensors in payloads.values() for t in tensors]


FREED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Linear(DIM, DIM),
    "function": lambda: nn.Sequential(nn.Linear(DIM, DIM), Split()),
    "compiled": lambda: compiled(nn.Linear(DIM, DIM)),
}


class Split(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return Twice.apply(x)


@pytest.fixture
def no_cycles() -> Iterator[None]:
    """A block in which the collector frees nothing, so that what is gone was held by nobody."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("op", ["B", "I"])
@pytest.mark.parametrize("kind", FREED)
def test_what_was_sent_is_freed(kind: str, op: str, recompute: bool, no_cycles: None) -> None:
    torch.manual_seed(0)
    module = FREED[kind]()
    alone = copy.deepcopy(getattr(module, "_orig_mod", module))
    stage = Stage(0, module, is_last=False, loss_fn=None, recompute=recompute and kind != "compiled")
    batch = torch.randn(3, ROWS, DIM)
    for number, x in enumerate(batch):  # three microbatches in flight
        payloads, memory = send(stage, number, x)
        assert all(each() is not None for each in memory)
        del payloads  # now they are sent
        assert all(each() is None for each in memory)
    for number, x in enumerate(batch):
        outputs = alone(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [torch.randn(ROWS, DIM) for _ in outputs]
        torch.autograd.backward(outputs, grads)
        if op == "B":
            stage.backward(number, {"main": grads})
        else:
            stage.backward_input(number, {"main": grads})
            stage.backward_weight(number)
    assert_same_grads(getattr(module, "_orig_mod", module), alone)


class Whole(nn.Module):
    """Uses one value after the cut for nothing that leads to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.norm = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        beside = h * 2
        y = self.second(h)
        self.norm = beside.detach().abs().sum() + y.detach().sum() + (beside + y).sum() * 0
        return y


@pytest.mark.parametrize("op", ["B", "I"])
def test_stages_of_a_whole_model_free_what_they_sent(op: str, no_cycles: None) -> None:
    """Also values that no gradient is expected for."""
    torch.manual_seed(0)
    model, x = Whole(), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(model.first)
    part = split_model(model, ["second"], sample=x)[0]
    stage = Stage(0, part, is_last=False, loss_fn=None)
    for number in range(3):
        payloads, memory = send(stage, number, x)
        looks = [each.needs_grad for spec, _ in payloads.values() for each in spec.tensors]
        assert looks == [True, True]
        del payloads
        assert all(each() is None for each in memory)
    for number in range(3):
        grads = {"main": [torch.ones(ROWS, DIM), torch.zeros(ROWS, DIM)]}
        if op == "B":
            stage.backward(number, grads)
        else:
            stage.backward_input(number, grads)
            stage.backward_weight(number)
        alone(x).backward(torch.ones(ROWS, DIM))
    assert_same_grads(part.first, alone)


@pytest.mark.parametrize("op", ["B", "I"])
def test_under_a_default_device_too(op: str, no_cycles: None) -> None:
    """``torch.device`` as a block is a function mode, which sees all functions of torch."""
    layer, x = nn.Linear(DIM, DIM), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(layer)
    stage = Stage(0, layer, is_last=False, loss_fn=None)
    with torch.device("cpu"):
        payloads, memory = send(stage, 0, x)
        del payloads
        assert all(each() is None for each in memory)
        grads = {"main": [torch.ones(ROWS, DIM)]}
        stage.backward(0, grads) if op == "B" else stage.backward_input(0, grads)
        if op == "I":
            stage.backward_weight(0)
    alone(x).backward(torch.ones(ROWS, DIM))
    assert_same_grads(layer, alone)


class Named(Tensor):
    """A subclass that torch's functions are passed to."""


class Naming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).as_subclass(Named)


@pytest.mark.parametrize("op", ["B", "I"])
def test_a_subclass_with_a_say_is_kept(op: str) -> None:
    layer, x = Naming(), torch.randn(ROWS, DIM)
    alone = copy.deepcopy(layer)
    stage = Stage(0, layer, is_last=False, loss_fn=None)
    payloads, memory = send(stage, 0, x)
    del payloads
    assert all(each() is not None for each in memory)
    grads = {"main": [torch.ones(ROWS, DIM)]}
    stage.backward(0, grads) if op == "B" else stage.backward_input(0, grads)
    if op == "I":
        stage.backward_weight(0)
    alone(x).backward(torch.ones(ROWS, DIM))
    assert_same_grads(layer, alone)


def test_what_autograd_saved_stays(no_cycles: None) -> None:
    stage = Stage(0, nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()), is_last=False, loss_fn=None)
    payloads, memory = send(stage, 0, torch.randn(ROWS, DIM))
    del payloads
    assert all(each() is not None for each in memory)
    stage.backward(0, {"main": [torch.ones(ROWS, DIM)]})
    assert all(each() is None for each in memory)


# What a rank holds

WIDE, COUNT = 32, 6


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE)) for _ in "ab")
    )


def held(recompute: bool) -> int:
    """The most bytes of a step of gpipe, beyond those that were there before."""
    plan = schedule.make("gpipe", ranks=2, microbatches=COUNT)
    x = torch.randn(COUNT * ROWS, WIDE)
    pipe = Pipeline(blocks(), schedule=replace(plan, recompute=(0, 1) if recompute else ()), loss_fn=F.mse_loss)
    pipe.step(x, target=x, record=False)
    with OperationCounter() as counter:
        pipe.step(x, target=x, record=False)
        before = counter.peak = counter.now
        pipe.step(x, target=x, record=False)
    pipe.close()
    return counter.peak - before


def free_what_they_sent(rank: int, predicted: dict[bool, list[int]]) -> None:
    message = ROWS * WIDE * 4
    for recompute, sizes in predicted.items():
        now = held(recompute)
        assert now == pytest.approx(sizes[rank], rel=0.003), (recompute, now, sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Root, "of", Root)  # keeps the tensor
            kept = held(recompute)
        assert kept - now == (COUNT * message if rank == 0 else 0), (recompute, kept, now)


def test_a_rank_holds_a_message_less_for_each_microbatch() -> None:
    """In its first backward, which is the fullest moment of this model: all of its messages have arrived by then."""
    x = torch.randn(ROWS, WIDE)
    found = pipeline.fit(
        blocks(), x, ranks=2, n_microbatches=COUNT, schedule="gpipe", loss_fn=F.mse_loss, target=x, optimizer="none"
    )
    predicted = {
        bool(way.recompute): [each.activations + each.working for each in way.ranks]
        for way in found.ways
        if not way.moved
    }
    assert set(predicted) == {False, True}
    on_ranks(2, free_what_they_sent, predicted)
