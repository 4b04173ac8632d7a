"""Where nobody can have put a hook, I asks the engine for the gradients at the cuts, and puts no hooks there itself.

The engine gives these gradients from before the hooks on tensors. So each case in which there is a hook after all must
be noticed, whenever it was put there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sternway import split
from sternway._torch.autograd import edge_of, gradients_at, newest_sequence_number
from sternway._torch.hooks import hooks_registered
from sternway.split.compiled._backend import sternway
from sternway.state import BackwardState

backward_input = functools.partial(split.backward_input, own_thread=True)


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
    (grad,), pending = backward_input(call(models[1], x), None, [x])  # first, while there are no other hooks
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
    _, pending = backward_input(loss, None, [x])
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
        backward_input(squares(ours, x), exact=exact)[1].run()
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **({"rtol": 0, "atol": 0} if exact else {}))


def test_a_graph_of_another_thread() -> None:
    """Its numbers say nothing here: without a promise, no hook on it is missed, however many graphs lie between."""
    model, x = stack(), torch.randn(3, 4)
    made: list[Tensor] = []

    def count_to(number: int) -> None:
        while newest_sequence_number() <= number:
            squares(model, x)

    def work(number: int) -> None:
        count_to(number)
        made.extend(hooked(model, x) for _ in range(2))
        made.append(torch.tensor(newest_sequence_number()))

    worker = threading.Thread(target=work, args=(newest_sequence_number() + 1000,))
    worker.start()
    worker.join()
    split.backward_input(squares(model, x))[1].run()  # here the hooks are noticed
    model.zero_grad()
    count_to(int(made[2]))  # now the other thread's numbers are among those that were given here since
    made[0].backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    split.backward_input(made[1])[1].run()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_compiled_region_whose_state_puts_a_hook_on_an_activation() -> None:
    layer, data, held = nn.Linear(4, 4), torch.randn(3, 4), list[Tensor]()

    def run(grad: Tensor) -> None:
        held[-1].register_hook(lambda each: 3 * each)

    def region(a: Tensor, carried: BackwardState) -> Tensor:
        return carried.on_grad(torch.tanh(a), run).square()

    compiled = torch.compile(region, backend=sternway, options={"inner": "eager"})
    grads = []
    for splits in (False, True):
        layer.zero_grad()
        split.forward_begins()
        x = data.clone().requires_grad_()
        held.append(layer(x))
        loss = compiled(torch.sin(held[-1]), BackwardState()).sum()
        if splits:
            backward_input(loss, None, x)[1].run()
        else:
            loss.backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    for mine, plain in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(mine, plain)


def test_a_torch_without_the_direct_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is torch's own, and may get another name; ``torch.autograd.grad`` has imported it by itself."""
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    x = torch.ones(2, requires_grad=True)
    (found,) = gradients_at([edge_of(x)], [x.exp()], [torch.ones(2)])
    torch.testing.assert_close(found, x.exp().detach())
