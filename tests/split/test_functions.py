"""Nodes no rule knows, custom Functions and compiled graphs: computed once, in I; only their accumulation waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from compare import assert_split_equals_backward, names
from sternway import split


class Counts:
    forward = backward = 0


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        Counts.forward += 1
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Counts.backward += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class OnceLinear(Linear):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return Linear.backward(ctx, grad)


class Model(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 4))
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.function.apply(self.before(x), self.weight).tanh())


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("function", [Linear, OnceLinear])
def test_custom_function_runs_once(function: type[torch.autograd.Function], first_stage: bool) -> None:
    model = Model(function)
    Counts.forward = Counts.backward = 0
    pending = assert_split_equals_backward(model, torch.randn(5, 4, requires_grad=not first_stage), rounds=1)
    assert (Counts.forward, Counts.backward) == (2, 2)  # once each, and once each for the reference
    assert names(model, pending.ready) == {"weight"}
    assert len(pending.deferred) == 4


def _counting_backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
    """An eager AOTAutograd backend whose backward graphs count their runs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*arguments: Any) -> Any:
            Counts.backward += 1
            return graph(*arguments)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=backward)(
        graph, example_inputs
    )


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.filterwarnings("default")  # Dynamo reads .grad of what is not a leaf, and warns of itself
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_compiled_submodule_runs_its_backward_once(in_place: bool) -> None:
    torch._dynamo.reset()
    inner = Inner()
    if in_place:
        inner.compile(backend=_counting_backend)
        model = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
    else:
        model = nn.Sequential(nn.Linear(4, 4), torch.compile(inner, backend=_counting_backend), nn.Linear(4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    g = torch.randn(5, 4)

    model(x).backward(g)
    expected, expected_x = [p.grad.clone() for p in model.parameters()], x.grad.clone()
    model.zero_grad()
    x.grad = None

    Counts.backward = 0
    grad, pending = split.backward_input(model(x), g, x)
    pending.run()
    assert Counts.backward == 1
    torch.testing.assert_close(grad, expected_x)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted)
    assert len(pending.deferred) == len(pending.ready) == 4
