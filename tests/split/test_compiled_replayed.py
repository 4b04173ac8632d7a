"""``mode="reduce-overhead"`` on a CPU: which compiled regions are captured, with graphs replaced by calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from called_graphs import CalledForm
from models import gpt
from torch import Tensor, nn
from torch.fx import GraphModule

from compare import assert_same_grads, twin
from sternway import split
from sternway._torch.tracing import static_inputs
from sternway.split.captured import _capture
from sternway.split.compiled._backend import _with_none, sternway
from sternway.split.compiled._replayed import replayed

MADE: list[_capture.Captured] = []


def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
    parameters = {index: value for index, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
    fixed = sorted({*parameters, *static_inputs(module)})
    return replayed(_with_none(module, inputs, parameters), fixed, len(inputs))


@pytest.fixture(autouse=True)
def _called(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    MADE.clear()
    made = _capture.Captured.__init__

    def noted(self: _capture.Captured, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        MADE.append(self)

    monkeypatch.setattr(_capture.Captured, "__init__", noted)
    monkeypatch.setattr(_capture, "CapturedForm", CalledForm)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[::2])
def test_layers_share_code_and_calls_are_in_flight(order: tuple[int, ...]) -> None:
    model = gpt(16, 3)
    reference = twin(model)[0]
    for block in model:
        block.compile(backend=backend)
    for number in range(2):
        batches = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(3)]
        grad = torch.randn(2, 5, 16)
        outputs = [model(x) for x in batches]
        found = [split.backward_input(y, grad, x) for y, x in zip(outputs, batches, strict=True)]
        for index in order:
            assert set(found[index][1].deferred) == set(model.parameters())
            found[index][1].run()
        for x, (mine, _) in zip(batches, found, strict=True):
            theirs = x.detach().clone().requires_grad_()
            reference(theirs).backward(grad)
            torch.testing.assert_close(mine, theirs.grad)
        assert len(MADE) == 3, "one capture for each layer"
        assert [each.sets for each in MADE] == [3, 3, 3], f"one set for each call in flight, round {number}"
    assert_same_grads(model, reference)
    assert all(each.refusals == [] for each in MADE)


@pytest.mark.slow
def test_on_a_cpu_the_mode_makes_no_graphs() -> None:
    model = nn.Linear(4, 3)
    reference, x = twin(model)[0], torch.randn(5, 4, requires_grad=True)
    fast = torch.compile(model, backend=sternway, mode="reduce-overhead")
    split.backward_input(fast(x).sin().sum(), None, x)[1].run()
    reference(x.detach()).sin().sum().backward()
    assert_same_grads(model, reference)
    assert MADE == []


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.table = nn.Linear(4, 6), nn.BatchNorm1d(6), torch.arange(6.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)) * self.table


def test_buffers_are_the_modules_own_and_what_is_replaced_is_seen() -> None:
    model = Norms()
    reference = twin(model)[0]
    fast = torch.compile(model, backend=backend)
    for _ in range(2):
        x = torch.randn(5, 4, requires_grad=True)
        fast(x).square().sum().backward()
        reference(x.detach()).square().sum().backward()
        model.table, reference.table = model.table + 1, reference.table + 1
    assert_same_grads(model, reference)
    torch.testing.assert_close(dict(model.named_buffers())["norm.running_mean"], reference.norm.running_mean)
    assert len(MADE) == 2, "another one for the other table"


def test_a_parameter_that_is_passed_waits() -> None:
    weights = [nn.Parameter(torch.randn(3, 3)) for _ in range(2)]
    fast = torch.compile(lambda x, weight: (x @ weight).sin(), backend=backend)
    for number in range(4):
        weight, x = weights[number % 2], torch.randn(2, 3, requires_grad=True)
        found, pending = split.backward_input(fast(x, weight).sum(), None, x)
        before = None if weight.grad is None else weight.grad.clone()
        pending.run()
        mine, theirs = torch.autograd.grad((x @ weight).sin().sum(), [x, weight])
        torch.testing.assert_close(found, mine)
        torch.testing.assert_close(weight.grad, theirs if before is None else theirs + before)
        assert pending.deferred == (weight,)
    assert len(MADE) == 2


@pytest.mark.parametrize("of", ["an input", "each other"])
def test_a_region_that_returns_views_runs_as_it_is(of: str) -> None:
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3, requires_grad=True)
    shown = "returns one of its inputs, or a view of it" if of == "an input" else "returns two views of the same memory"

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ weight
        return h, (x if of == "an input" else h).view(-1)

    with pytest.warns(UserWarning, match=f"CompiledLayer runs as it is, without CUDA graphs: the region {shown}"):
        h, view = torch.compile(function, backend=backend)(x, weight)
    with torch.no_grad():
        view.zero_()
    assert not (x if of == "an input" else h).any(), "a view is one still"
