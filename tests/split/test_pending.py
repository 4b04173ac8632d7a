"""A Pending's life: run in any order, dropped, run twice, after an error; what it holds and when it lets go."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway import saved, split
from sternway.errors import PendingError, SplitError
from sternway.split import _accumulate
from sternway.split.eager._native import EXTENSION


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Without the cycle collector: whatever is not freed by counting references stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_microbatches_accumulate_with_w_in_any_order() -> None:
    model = gpt(8, 1, heads=2)
    batches = torch.randn(3, 2, 4, 8).unbind(0)
    reference = twin(model)[0]
    for batch in batches:
        reference(batch).square().sum().backward()
    for order in itertools.permutations(range(3)):
        model.zero_grad()
        pendings = [split.backward_input(model(batch).square().sum())[1] for batch in batches]
        for index in order:
            pendings[index].run()
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)


def test_gradients_are_added_to_in_place() -> None:
    """Optimizers and reducers keep views of .grad in flat buffers."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.grad for parameter in layer.parameters()]
    split.backward_input(layer(torch.randn(5, 4)).square().sum())[1].run()
    assert all(parameter.grad is grad for parameter, grad in zip(layer.parameters(), before, strict=True))
    assert all(grad.any() for grad in before)


def test_two_parameters_whose_gradients_are_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one call that adds to several tensors adds to all at once: it must get each memory once."""
    first, second, shared = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(4)
    first.bias.grad, second.bias.grad = shared, shared.view(4)
    called = []

    def add_each(totals: list[Tensor], values: list[Tensor]) -> None:
        called.append([total.data_ptr() for total in totals])
        torch._foreach_add_(totals, values)

    monkeypatch.setattr(_accumulate, "add_each", add_each)
    monkeypatch.setattr(_accumulate, "_runs_at_once", lambda value: False)  # as on a GPU
    monkeypatch.setattr(EXTENSION, "is_on", False)  # which a GPU's graphs are not for
    split.backward_input(second(first(torch.randn(5, 4))).sum())[1].run()
    assert called
    assert all(len(set(memories)) == len(memories) for memories in called)
    torch.testing.assert_close(shared, 5 + 5 * second.weight.detach().sum(0))


def _of_grad(weight: Tensor, x: Tensor, read: str) -> tuple[Tensor, Tensor]:
    """What is made of ``weight.grad`` in some way, and the gradient that is to arrive there."""
    grad, ones = weight.grad, torch.ones(4, 4)
    assert grad is not None
    match read:
        case "left":
            return (grad @ weight) * x.sin(), ones
        case "right":
            return (weight @ grad) * x.sin(), ones
        case "view":
            return x.sin() @ weight + grad.t()[1:].reshape(-1)[:4].expand(4, 4) @ weight, ones
        case "compiled":
            call = torch.compile(lambda some, other: some @ other, backend="sternway", options={"inner": "eager"})
            return call(grad, weight) * x.sin(), ones
        case "learned":
            return Scaled.apply(weight, grad) * x.sin(), ones
    return x.sin() @ weight, grad


class Scaled(torch.autograd.Function):
    """A Function whose backward reads what it saved."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return weight * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad * ctx.saved_tensors[0] if ctx.needs_input_grad[0] else None), None


@pytest.mark.parametrize("read", ["left", "right", "view", "compiled", "learned", "arriving"])
def test_a_grad_that_the_graph_reads_is_read_as_it_was(read: str) -> None:
    before, weight, x = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    weight.grad = before.clone()
    y, grad = _of_grad(weight, x, read)
    expected = torch.autograd.grad(y, [x, weight], grad, retain_graph=read != "compiled")
    if read == "compiled":
        y, grad = _of_grad(weight, x, read)
    grad_of_x, pending = split.backward_input(y, grad, x)
    pending.run()
    torch.testing.assert_close((grad_of_x, weight.grad), (expected[0], before + expected[1]))


@pytest.mark.parametrize("packs", ["forward", "pending"])
@pytest.mark.parametrize("read", ["left", "arriving"])
def test_a_grad_that_a_policy_leaves_where_it_is(read: str, packs: str) -> None:
    """A tensor this small is not worth packing."""
    before, weight, x = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    weight.grad = before.clone()
    policy = saved.compress("bf16")
    with policy if packs == "forward" else nullcontext():
        y, grad = _of_grad(weight, x, read)
    expected = torch.autograd.grad(y, weight, grad, retain_graph=True)[0]
    _, pending = split.backward_input(y, grad, x)
    if packs == "pending":
        pending.pack(policy)
    pending.run()
    torch.testing.assert_close(weight.grad, before + expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("last", [False, True])
def test_a_grad_that_another_parameters_gradient_is_made_of(last: bool) -> None:
    """W adds to the one while the other is still to be computed."""
    one, other, x = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    one.grad, other.grad = torch.ones(4, 4), torch.ones(4, 4)
    y = (one.grad @ other) * x.sin()
    y = y @ one if last else x.cos() @ one + y
    expected = torch.autograd.grad(y, [one, other], torch.ones(4, 4), retain_graph=True)
    split.backward_input(y, torch.ones(4, 4), x)[1].run()
    torch.testing.assert_close([one.grad, other.grad], [1 + each for each in expected])


def test_forward_mode_is_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(SplitError, match="must not run in forward mode"):
        split.backward_input(layer(x).sum(), None, x)


def test_first_gradients_share_memory_with_nothing() -> None:
    layer = nn.Linear(4, 4)
    grad = torch.randn(1, 4)
    _, pending = split.backward_input(layer(torch.randn(1, 4)) + layer.bias, grad)
    pending.run()
    expected = grad.clone()
    layer.bias.grad.zero_()
    torch.testing.assert_close(grad, expected)


def test_dropping_it_leaves_the_parameters_alone() -> None:
    layer = nn.Linear(4, 4)
    _, pending = split.backward_input(layer(torch.randn(5, 4)).sum())
    del pending
    assert layer.weight.grad is None
    split.backward_input(layer(torch.randn(5, 4)).sum())[1].run()
    assert layer.weight.grad is not None


def test_a_second_run_raises() -> None:
    layer = nn.Linear(4, 4)
    _, pending = split.backward_input(layer(torch.randn(5, 4)).sum())
    pending.run()
    expected = layer.weight.grad.clone()
    with pytest.raises(
        PendingError, match=r"cannot run twice.* got run\(\) on one that has run. Fix: call backward_input"
    ):
        pending.run()
    torch.testing.assert_close(layer.weight.grad, expected)


def test_a_run_that_failed_is_not_run_again() -> None:
    layer = nn.Linear(4, 4)
    handle = layer.weight.register_hook(lambda grad: 1 / 0)
    _, pending = split.backward_input(layer(torch.randn(5, 4)).sum())
    with pytest.raises(ZeroDivisionError):
        pending.run()
    handle.remove()
    with pytest.raises(PendingError, match="failed half-way"):
        pending.run()


def test_an_error_in_i_leaves_everything_usable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    seen: list[Tensor] = []
    model[1].weight.register_hook(seen.append)
    x = torch.randn(5, 4, requires_grad=True)
    h = model[0](x)
    handle = h.register_hook(lambda grad: 1 / 0)
    y = model[2](model[1](h)).sum()
    with pytest.raises(ZeroDivisionError):
        split.backward_input(y, None, x)
    handle.remove()
    assert not seen
    reference, their_x = twin(model, x)
    grad, pending = split.backward_input(model(x).sum(), None, x)
    pending.run()
    reference(their_x).sum().backward()
    torch.testing.assert_close(grad, their_x.grad)
    assert_same_grads(model, reference)
    assert len(seen) == 1


def test_nbytes_counts_each_storage_once_and_no_parameters() -> None:
    layer = nn.Linear(8, 6)
    x = torch.randn(5, 8, requires_grad=True)
    _, pending = split.backward_input(layer(x), torch.randn(5, 6), x)
    assert pending.nbytes == 4 * (5 * 8 + 5 * 6)  # the input for the weight, the gradient for both
    pending.run()
    assert pending.nbytes == 0
    conv = nn.Conv1d(3, 3, 3, bias=False)
    x = torch.randn(2, 3, 7, requires_grad=True)
    _, pending = split.backward_input(conv(x), torch.randn(2, 3, 5), x)
    assert pending.nbytes == 4 * (2 * 3 * 7 + 2 * 3 * 5)


def test_repr_says_what_waits() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    _, pending = split.backward_input(layer(torch.randn(5, 4)).sum())
    assert repr(pending) == "Pending(waiting: 2 parameters deferred, 2 ready, 192 B held)"


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
def test_after_i_only_what_w_needs_is_alive(first_stage: bool) -> None:
    first, norm, second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    x = torch.randn(5, 4, requires_grad=not first_stage)
    h = first(x)
    n = norm(h)
    g = torch.nn.functional.gelu(n)
    y = second(g)
    alive = {name: weakref.ref(t.untyped_storage()) for name, t in {"h": h, "n": n, "g": g}.items()}
    del h, n, g
    assert all(ref() is not None for ref in alive.values())  # the graph saved each of them
    _, pending = split.backward_input(y, torch.randn(5, 4), [x])
    del y
    assert [name for name, ref in alive.items() if ref() is not None] == ["g"]  # the second layer's input
    # both layers' inputs and output gradients, and the norm's two small gradients
    assert pending.nbytes == 4 * (5 * 8 + 5 * 4 + 5 * 4 + 5 * 8 + 8 + 8)
    pending.run()
    assert alive["g"]() is None


@pytest.mark.usefixtures("no_gc")
def test_w_lets_go_as_it_goes() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    _, pending = split.backward_input(layers(torch.randn(5, 4)).sum())
    held: list[int] = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: held.append(pending.nbytes))
    pending.run()
    assert len(held) == 8
    assert held == sorted(held, reverse=True)
    assert len(set(held)) >= 4
    assert held[-1] == 0


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("finish", ["run", "drop", "fail"])
def test_no_reference_cycles(finish: str) -> None:
    model = gpt(8, 2, heads=2)
    x = torch.randn(2, 4, 8, requires_grad=True)
    y = model(x)
    mark = torch.zeros(1)  # in the node's metadata, to see when the node goes: nodes take no weak references
    y.grad_fn.metadata["mark"] = mark
    watched = weakref.ref(mark)
    del mark
    if finish == "fail":
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            split.backward_input(y, torch.randn_like(y), x)
    else:
        _, pending = split.backward_input(y, torch.randn_like(y), x)
        if finish == "run":
            pending.run()
        gone = weakref.ref(pending)
        del pending
        assert gone() is None
    del y
    assert watched() is None
