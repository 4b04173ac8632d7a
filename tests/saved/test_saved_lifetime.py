"""What lives how long: leaks, dropped graphs, errors, threads, several models, retained graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from models import gpt
from saved_steps import assert_equal, grads_of, moving
from torch import Tensor, nn

from sternway import saved
from sternway.errors import SavedError
from sternway.saved import Offload


def _is_clean(policy: Offload) -> bool:
    offloader = policy.offloader
    round_ = offloader._round
    return (
        not round_.alive
        and not offloader._dropped
        and offloader.store.pool.taken_bytes == 0  # type: ignore[attr-defined]
        and not round_.here
        and not round_.flights
        and not round_.coming
        and round_.here.nbytes == round_.flights.nbytes == round_.coming.nbytes == 0
    )


def test_two_hundred_steps_leave_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    policy = moving(budget=0.3)
    counts = []
    for step in range(200):
        with policy as report, saved.mutable(), saved.compress("bf16", where="0.*", min_bytes=0):
            loss = model(x).square().mean()
        loss.backward()
        del loss
        assert report.held_bytes == 0
        if step % 50 == 49:
            gc.collect()
            counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
            assert _is_clean(policy)
    assert counts[1] == counts[-1], counts
    assert len(policy.slots) == 0
    assert policy.offloader.rounds == 200


def test_a_graph_that_is_dropped_frees_its_buffers() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)
    policy = moving()
    with policy as report:
        loss = model(x).sum()
    assert policy.offloader.store.pool.taken_bytes > 0  # type: ignore[attr-defined]
    del loss
    assert _is_clean(policy)
    assert report.held_bytes == 0
    assert_equal(grads_of(model, x, policy), grads_of(model, x))


def test_no_cycle_keeps_a_saved_output_alive() -> None:
    gc.disable()
    try:
        with saved.keep():
            y = torch.randn(5, requires_grad=True).exp()  # saves its own result
        reference = weakref.ref(y)
        del y
        assert reference() is None
        with moving(budget=10**6), saved.mutable():
            y = torch.randn(5, requires_grad=True).exp()
        reference = weakref.ref(y)
        del y
        assert reference() is None
    finally:
        gc.enable()


def test_an_error_in_the_forward_leaves_nothing() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)
    policy = moving()

    def run() -> None:
        with policy:
            model(x)
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run()
    assert _is_clean(policy)
    assert policy.offloader.store.pool.free_bytes == 0  # type: ignore[attr-defined]  # not kept for reuse either
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_equal(grads_of(model, x, policy), grads_of(model, x))


def test_an_error_in_the_backward_leaves_nothing() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16, requires_grad=True)
    policy = moving()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    def run() -> None:
        with policy:
            h = model[0](x)  # type: ignore[index]
            h.register_hook(fail)
            loss = model[1](h).sum()  # type: ignore[index]
        loss.backward()

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run()
    gc.collect()
    assert _is_clean(policy)


def test_a_graph_can_be_retained() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)
    policy = moving(window=0, prefetch=2000)
    with policy:
        loss = model(x).square().sum()
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).square().sum().backward()
        assert_equal(found, [p.grad for p in model.parameters()])
    del loss
    assert _is_clean(policy)


def test_half_a_backward_and_then_the_rest() -> None:
    a, b = (torch.randn(50, requires_grad=True) for _ in range(2))
    policy = moving(window=0)
    with policy:
        x, y = a.exp(), b.sin()
        loss = (x * y).sum()
    (half,) = torch.autograd.grad(loss, a, retain_graph=True)
    (rest,) = torch.autograd.grad(loss, b)
    assert torch.equal(half, a.exp() * b.sin())
    assert torch.equal(rest, a.exp() * b.cos())
    del loss, x, y
    assert _is_clean(policy)


@pytest.mark.parametrize("policy", [moving(window=0), saved.mutable(), saved.keep()], ids=["moved", "mutable", "keep"])
def test_double_backward(policy: Any) -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with policy:
            return (x @ weight).tanh().exp() * x

    assert torch.autograd.gradcheck(function, (x, weight))
    assert torch.autograd.gradgradcheck(function, (x, weight))


def test_backwards_in_many_threads() -> None:
    """One policy, several graphs, each backward in a thread of its own; and forwards in threads too."""
    policy = moving(budget=0.5, prefetch=3000, window=2000)
    models = [gpt(16, 2) for _ in range(4)]
    x = torch.randn(2, 5, 16)
    expected = [grads_of(model, x) for model in models]
    found: list[Any] = [None] * len(models)
    errors: list[BaseException] = []
    gate = threading.Barrier(len(models))

    def run(index: int) -> None:
        try:
            for _ in range(5):
                gate.wait()
                model = models[index]
                model.zero_grad()
                leaf = x.clone().requires_grad_()
                with policy:
                    out = model(leaf)
                    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
                loss.backward()
                found[index] = [leaf.grad, *(p.grad.clone() for p in model.parameters())]
                del out, loss
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(mine, theirs)
    assert _is_clean(policy)


def test_a_policy_is_its_threads_own() -> None:
    seen = []

    def other() -> None:
        y = torch.randn(5, requires_grad=True).exp()  # held: torch's raw view of what a node saved does not hold it
        seen.append(type(y.grad_fn._raw_saved_result.data))  # type: ignore[union-attr]

    with moving():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [Tensor]


def test_several_models_at_once_each_with_its_policy() -> None:
    first, second = gpt(16, 2), gpt(16, 1)
    x = torch.randn(2, 5, 16)
    one, two = moving(), moving(budget=0.5)
    expected = grads_of(first, x), grads_of(second, x)
    for _ in range(3):
        with one as report_one:
            a = first(x.requires_grad_()).sum()
        with two as report_two:
            b = second(x).sum()
        first.zero_grad()
        second.zero_grad()
        b.backward()
        a.backward()
        assert report_one.moved_bytes > report_two.moved_bytes > 0
    assert _is_clean(one)
    assert_equal(grads_of(first, x, one), expected[0])
    assert_equal(grads_of(second, x, two), expected[1])


def test_the_same_policy_inside_itself() -> None:
    model, x = gpt(16, 2), torch.randn(2, 5, 16)
    policy = moving()
    with policy, policy:
        found = grads_of(model, x)
    assert_equal(found, grads_of(model, x))
    assert _is_clean(policy)


def test_a_tensor_saved_in_two_versions_has_two_slots() -> None:
    x = torch.randn(10, requires_grad=True)
    policy = moving(window=0)
    with policy as report:
        y = x * 1
        a = (y * y).sum()
        y = y.add_(1)
        b = (y * y).sum()
    (grad,) = torch.autograd.grad(a + b, x)
    torch.testing.assert_close(grad, 2 * x + 2 * (x + 1))
    assert report.moved_bytes == 80


@pytest.mark.parametrize("policy", [saved.keep(), moving(budget=10**6)], ids=["keep", "resident"])
def test_a_change_in_place_is_an_error_as_without_policies(policy: Any) -> None:
    x = torch.randn(10, requires_grad=True)
    with policy:
        y = x * 1
        loss = (y * y).sum()
        y.add_(1)
    with pytest.raises(SavedError, match="modified by an inplace operation"):
        loss.backward()


def test_parts_that_count_apart_are_saved_apart() -> None:
    """``unsafe_split`` makes parts of one storage with a version each: a GRU writes to one and saves another."""
    layer, x = nn.GRU(6, 6, batch_first=True), torch.randn(2, 5, 6)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]  # type: ignore[no-any-return]

    assert_equal(grads_of(First(), x, moving()), grads_of(First(), x))
    whole = torch.randn(6, requires_grad=True) * 1
    one, two = whole.unsafe_split(3)
    with moving():
        a = one.exp() * one
        two.sigmoid_()
        b = two * two.exp()
    (a.sum() + b.sum()).backward()


def test_policies_are_refused_where_torch_refuses_hooks() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"), moving():
        torch.func.grad(function)(torch.randn(3))
