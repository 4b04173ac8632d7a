"""Custom Functions between a weight and its product, as a DTensor's ``to_local`` is: W goes through their nodes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from compare import names
from sternway import split
from sternway._torch.functions import functions_outlive_graphs


class _Thing:
    """What a Function keeps for its backward."""


class _Scale(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.thing = factor, _Thing()
        _Scale.things.append(weakref.ref(ctx.thing))
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None

    things: list[weakref.ref[_Thing]] = []  # noqa: RUF012 - emptied by the test that reads it


class _Model(nn.Module):
    """Two products; a Function is behind each weight, and one on the way between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.high = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.side = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = _Scale.apply(x @ _Scale.apply(self.low, 2.0), 3.0)
        return (x @ _Scale.apply(self.high, 5.0)).tanh() + _Scale.apply(self.side, 7.0).exp()


@pytest.mark.parametrize("needs_input_grad", [True, False], ids=["inputs", "first stage"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_the_output_is_gone_before_w(needs_input_grad: bool, hooked: bool) -> None:
    """In torch 2.11 nothing kept the Functions' nodes, and W failed."""
    ours, theirs = _Model(), _Model()
    seen: list[Tensor] = []
    if hooked:
        ours.high.register_hook(seen.append)
    pendings = []
    for step in range(3):
        torch.manual_seed(step)
        x, y = (each.requires_grad_(needs_input_grad) for each in torch.randn(3, 4).expand(2, 3, 4).clone().unbind())
        theirs(y).sum().backward()
        (grad,), pending = split.backward_input(ours(x).sum(), None, [x])
        torch.testing.assert_close(grad, y.grad)
        assert {"low", "high"} <= names(ours, pending.deferred)
        pendings.append(pending)
        gc.collect()
    for number in (1, 2, 0):
        pendings[number].run()
    assert len(seen) == (3 if hooked else 0)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def test_what_functions_keep_is_freed() -> None:
    """That of the spine after I, if nodes keep themselves; all of it after W."""
    _Scale.things.clear()
    model, x = _Model(), torch.randn(3, 4, requires_grad=True)
    _, pending = split.backward_input(model(x).sum(), None, x)
    gc.collect()
    waiting = [thing() is not None for thing in _Scale.things]  # behind low, between, behind high, behind side
    assert waiting[0] is waiting[2] is True
    assert waiting[1] is not functions_outlive_graphs()
    pending.run()
    del pending
    gc.collect()
    assert all(thing() is None for thing in _Scale.things)
