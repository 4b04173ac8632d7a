"""Where nobody can have put a hook, I asks the engine for the gradients at the cuts, and puts no hooks there itself.

The engine gives these gradients from before the hooks on tensors. So each case in which there is a hook after all must
be noticed, whenever it was put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sternway import split
from sternway._torch.hooks import hooks_registered


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Two models with the same weights: one for a plain backward, one for a split."""
    plain, ours = make(), make()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def assert_steps_equal(
    models: tuple[nn.Module, nn.Module], needs: bool, call: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """One step of each, whose gradients are added to what is there."""
    data = torch.randn(3, 4)
    theirs, x = (data.clone().requires_grad_(needs) for _ in models)
    (grad,), pending = split.backward_input(call(models[1], x), None, [x])  # first, while there are no other hooks
    pending.run()
    call(models[0], theirs).backward()
    if needs:
        torch.testing.assert_close(grad, theirs.grad)
    for mine, plain in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert (mine.grad is None) == (plain.grad is None)
        torch.testing.assert_close(mine.grad, plain.grad)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_no_hook_is_registered(needs: bool) -> None:
    models = twins(stack)
    assert_steps_equal(models, needs, squares)
    x = torch.randn(3, 4, requires_grad=needs)
    loss = squares(models[1], x)
    before = hooks_registered()
    _, pending = split.backward_input(loss, None, [x])
    assert hooks_registered() - before == (0 if needs else 1)  # the lowest cut of stage 0 refuses a second backward
    pending.run()


def hooked(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.children():
        x = layer(x)
        x.register_hook(lambda grad: 2 * grad)
    return x.square().sum()


def noded(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.children():
        x = layer(x)
        x.grad_fn.register_prehook(lambda grads: tuple(3 * grad for grad in grads))
    return x.square().sum()


class HooksBelow(torch.autograd.Function):
    """Its backward puts a hook on the tensor that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, below: list[Tensor]) -> Tensor:
        ctx.below = below
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.below[0].register_hook(lambda grad: 5 * grad)
        return grads[0] * 2, None


def hooked_as_it_runs(model: nn.Module, x: Tensor) -> Tensor:
    first, *rest = model.children()
    below = first(x)
    return HooksBelow.apply(nn.Sequential(*rest)(below), [below]).square().sum()


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
@pytest.mark.parametrize("late", [hooked, noded, hooked_as_it_runs])
def test_hooks_that_appear_after_steps_without(late: Callable[[nn.Module, Tensor], Tensor], needs: bool) -> None:
    models = twins(stack)
    for call in (squares, squares, late, squares, late, squares):
        assert_steps_equal(models, needs, call)


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
def test_what_changes_from_step_to_step(needs: bool) -> None:
    """Other weights need a gradient, a ``.grad`` is gone, another graph of as many nodes."""
    models = twins(stack)

    def freeze(model: nn.Module) -> None:
        model[0].weight.requires_grad_(False)
        model[2].bias.requires_grad_(False)

    def thaw(model: nn.Module) -> None:
        model.requires_grad_(True)

    def forget(model: nn.Module) -> None:
        model[0].weight.grad = model[2].bias.grad = model[1].weight.grad = None

    def swap(model: nn.Module) -> None:
        model[0], model[2] = model[2], model[0]

    assert_steps_equal(models, needs, squares)
    for change in (freeze, forget, thaw, swap, forget):
        for model in models:
            change(model)
        assert_steps_equal(models, needs, squares)


class Tied(nn.Module):
    """A bias that is used three times, in sums over one and over two dimensions, and a stack of products with one."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.weights = nn.Parameter(torch.randn(2, 4, 4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.bias = self.second.bias = self.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        return torch.baddbmm(self.bias, y.expand(2, -1, -1), self.weights)


@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_a_bias_is_summed_for_each_of_its_uses(exact: bool) -> None:
    plain, ours = twins(Tied)
    for _ in range(3):
        x = torch.randn(3, 4)
        squares(plain, x).backward()
        split.backward_input(squares(ours, x), exact=exact)[1].run()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **({"rtol": 0, "atol": 0} if exact else {}))
