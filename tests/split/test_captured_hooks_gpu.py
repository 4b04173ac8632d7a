"""Python between CUDA graphs on a GPU: functions of a state, hooks of parameters, and steps of optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from captured_cases import assert_same_bits, floats
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads, twin
from compiled import compiled
from sternway import split
from sternway.errors import StateError
from sternway.state import BackwardState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


class Hooked(nn.Module):
    """Functions at three places: one looks, one replaces a gradient, one is at a weight."""

    def __init__(self, at_weight: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.drop = gpt(32, 1), nn.Linear(32, 32), nn.Dropout(0.3)
        self.state: Any = BackwardState()
        self.seen: list[tuple[str, float, Tensor]] = []
        self.at_weight = at_weight

    def look(self, grad: Tensor) -> None:
        self.seen.append(("look", self.state.scale, grad))

    def replace(self, grad: Tensor) -> Tensor:
        self.seen.append(("replace", self.state.scale, grad))
        return grad * self.state.scale

    def weigh(self, grad: Tensor) -> Tensor:
        self.seen.append(("weigh", self.state.scale, grad))
        return grad / self.state.scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.state.on_grad(self.first(x), self.look)
        h = self.drop(self.state.on_grad(h.sin(), self.replace))
        weight = self.state.on_grad(self.last.weight, self.weigh) if self.at_weight else self.last.weight
        return F.linear(h, weight, self.last.bias)


def pair(model: nn.Module) -> nn.Module:
    other = twin(model)[0]
    other.state, other.seen = BackwardState(), []
    return other


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_functions_of_a_state_run_between_graphs(order: tuple[int, ...]) -> None:
    model = Hooked().cuda()
    eager = pair(model)
    stage = split.capture(model, floats(2, 8, 32), in_flight=3)
    assert stage.refusals == []
    assert stage.sets == 3
    assert model.seen == []
    for number in range(2):
        batches, grad = [floats(2, 8, 32) for _ in range(3)], torch.randn(2, 8, 32, device="cuda")
        found: list[list[Any]] = [[], []]
        for each, call, results in ((model, stage, found[0]), (eager, eager, found[1])):
            torch.manual_seed(number)
            outputs = []
            for index, x in enumerate(batches):
                outputs.append(call(x))
                each.state.scale = 2.0 + index + number
            results += [split.backward_input(y, grad, x) for y, x in zip(outputs, batches, strict=True)]
            for index in order:
                results[index][1].run()
        for (mine, _), (theirs, _) in zip(*found, strict=True):
            assert torch.equal(mine, theirs)
    assert len(model.seen) == len(eager.seen) == 18
    for (kind, scale, grad), (other, expected, theirs) in zip(model.seen, eager.seen, strict=True):
        assert (kind, scale) == (other, expected)
        assert torch.equal(grad, theirs), kind
    assert_same_bits(model, eager)
    assert stage.refusals == []
    assert stage.sets == 3


def test_a_plain_backward_and_a_function_that_raises() -> None:
    model = Hooked().cuda()
    eager, stage = pair(model), split.capture(model, floats(2, 8, 32))
    for number in range(3):
        x = floats(2, 8, 32)
        for each, call in ((model, stage), (eager, eager)):
            torch.manual_seed(number)
            y = call(x.detach()).sum()
            each.state.scale = 1.5
            y.backward()
    assert_same_grads(model, eager, rtol=1e-3, atol=1e-4)
    y = stage(x).sum()
    with pytest.raises(AttributeError, match="a value must be set"):
        y.backward()
    y = stage(x).sum()
    model.state.scale = 1.0
    y.backward()
    assert bool(torch.isfinite(x.grad).all())
    model.state.close()
    with pytest.raises(StateError, match="a closed state cannot be used"):
        stage(x)


def test_functions_in_compiled_code_inside_a_capture() -> None:
    torch._dynamo.reset()
    model = Hooked(at_weight=False).cuda()
    model.drop.p = 0.0
    eager = pair(model)
    stage = split.capture(compiled(model, "inductor"), floats(2, 8, 32), in_flight=2)
    assert stage.refusals == []
    assert model.seen == []
    for number in range(3):
        x, grad = floats(2, 8, 32), torch.randn(2, 8, 32, device="cuda")
        results = []
        for each, call in ((model, stage), (eager, eager)):
            y = call(x)
            each.state.scale = 2.0 + number
            results.append(split.backward_input(y, grad, x))
            results[-1][1].run()
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-4)
    assert [each[:2] for each in model.seen] == [each[:2] for each in eager.seen]
    assert len(model.seen) == 6
    assert_same_grads(model, eager, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_parameters_run_after_the_graphs(when: str) -> None:
    model = gpt(32, 1).cuda()
    reference = twin(model)[0]
    seen: list[list[Tensor]] = [[], []]

    def put() -> None:
        for each, log in ((model, seen[0]), (reference, seen[1])):
            each[0].up.weight.register_hook(lambda grad, log=log: log.append(grad.clone()) or 3 * grad)
            each[0].norm1.weight.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))

    if when == "before":
        put()
    stage = split.capture(model, floats(2, 8, 32))
    assert seen[0] == []
    if when == "after":
        put()
    for _ in range(3):
        x, grad = floats(2, 8, 32), torch.randn(2, 8, 32, device="cuda")
        split.backward_input(stage(x), grad, x)[1].run()
        reference(x.detach()).backward(grad)
    assert_same_grads(model, reference, rtol=1e-3, atol=1e-4)
    assert len(seen[0]) == len(seen[1]) == 6
    for mine, theirs in zip(*(sorted(log, key=Tensor.numel) for log in seen), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    assert stage.refusals == []
    assert stage.sets == 1


def make(kind: str, model: nn.Module, lr: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), float(lr), momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr, eps=0.1, capturable=True, fused=kind == "fused")


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
def test_captured_steps(kind: str) -> None:
    """Steps, a learning rate that changes, a state that is loaded, a gradient that is the user's."""
    model = gpt(32, 1).cuda()
    reference = twin(model)[0]
    stage = split.capture(model, floats(2, 8, 32))
    rates = [torch.tensor(0.01, device="cuda") for _ in range(2)]
    mine, theirs = make(kind, model, rates[0]), make(kind, reference, rates[1])
    step = split.capture_step(mine)
    as_it_is = {0, 7, 9, 10} | ({4} if kind == "sgd" else set())
    for number in range(12):
        x, target = floats(2, 8, 32), torch.randn(2, 8, 32, device="cuda")
        F.mse_loss(stage(x), target).backward()
        F.mse_loss(reference(x.detach()), target).backward()
        if number == 4:
            for optimizer, rate in zip((mine, theirs), rates, strict=True):
                if kind == "sgd":
                    optimizer.param_groups[0]["lr"] = 0.02
                else:
                    rate.fill_(0.02)
        if number == 7:
            for optimizer in (mine, theirs):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 9:
            for each in (model, reference):
                each[0].up.bias.grad = torch.full_like(each[0].up.bias, 0.1)
        before = step.replays
        step()
        theirs.step()
        assert step.replays == before + (number not in as_it_is), number
        mine.zero_grad()
        theirs.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_captured_step_with_hooks_runs_as_it_is() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    step, seen = split.capture_step(optimizer), []
    weight.grad = torch.ones(4, device="cuda")
    for _ in range(3):
        step()
    assert step.replays == 2
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
    step()
    assert (step.replays, seen) == (2, [1])
    handle.remove()
    for _ in range(2):
        step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 6 * 0.1, device="cuda"))
