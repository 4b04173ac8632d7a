"""Functions that are called in two parts, in the corners of what autograd allows."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functions import Around, Product
from learning import EXACT, assert_splits, compare, learning, row  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.autograd import Function

from compare import assert_same_grads, names, twin
from sternway import split


class InPlace(Product):
    """Changes its first input in place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone(), weight)
        ctx.rest = 0
        ctx.mark_dirty(x)
        return x.copy_(x @ weight)


class WithMask(Product):
    """A second output that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, mask = Product.forward(ctx, x, weight), x > 0
        ctx.mark_non_differentiable(mask)
        return y, mask

    @classmethod
    def apply(cls, *args: Any) -> Tensor:
        return super().apply(*args)[0]


class OnCtx(Function):
    """Keeps its tensors on ctx by name, as one should not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.both = x, {"weight": weight}
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.needs_input_grad
        found = grads[0] @ ctx.both["weight"].t() if of_x else None, ctx.x.t() @ grads[0] if of_weight else None
        ctx.x = ctx.both = None  # what it needs no more
        return found


class LowPrecision(Product):
    """Returns gradients of another dtype and a broadcast shape, which the engine casts and sums."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = Product.backward(ctx, *grads)
        return of_x, None if of_weight is None else of_weight.to(torch.bfloat16).expand(3, 4, 4)


class SavesItsOutput(Product):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = (x @ weight).tanh()
        ctx.save_for_backward(x, weight, y)
        ctx.rest = 0
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        grad, needs = grads[0] * (1 - y * y), ctx.needs_input_grad
        return grad @ weight.t() if needs[0] else None, x.t() @ grad if needs[1] else None


@pytest.mark.parametrize("function", [InPlace, WithMask, OnCtx, LowPrecision, SavesItsOutput])
@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
def test_kinds_of_functions(function: Any, first_stage: bool) -> None:
    model = Around(function)
    assert_splits(model, torch.randn(5, 4, requires_grad=not first_stage), waits={"weight"})


@pytest.mark.parametrize("function", [OnCtx, SavesItsOutput])
def test_w_does_not_hold_the_graph(function: Any) -> None:
    model, x = Around(function), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    hidden = model.before(x)
    y = function.apply(hidden, model.weight)
    node, activation = weakref.ref(y.grad_fn), weakref.ref(hidden)
    _, pending = split.backward_input(y.sum(), None, x)
    del hidden, y
    gc.collect()
    assert node() is None
    assert activation() is None
    pending.run()


class TalksToOthers(Product):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = grads[0].clone()
        dist.all_reduce(total)
        return Product.backward(ctx, total)


def test_one_that_talks_to_other_processes_stays_whole() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Around(TalksToOthers)
        pending = compare(model, torch.randn(5, 4, requires_grad=True), rounds=3)
        assert "weight" in names(model, pending.ready)
        assert row("TalksToOthers").why.startswith("talks to other processes (c10d::allreduce_")
    finally:
        dist.destroy_process_group()


def test_a_hook_that_steps_an_optimizer() -> None:
    """It changes the weights that other parts are made from, in the middle of W."""
    model, x = nn.Sequential(Around(Product), Around(Product)), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"0.weight", "1.weight"})
    reference, their_x = twin(model, x)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for each in (*model.parameters(), *reference.parameters()):
        each.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        reference(their_x).sum().backward()
        _, pending = split.backward_input(model(x).sum(), None, x)
        pending.run()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **EXACT)


def test_a_weight_that_is_frozen_before_w_gets_no_gradient() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    _, pending = split.backward_input(model(x).sum(), None, x)
    model.weight.requires_grad_(False)
    pending.run()
    assert model.weight.grad is None
    assert model.after.weight.grad is not None


def test_w_may_run_in_another_thread_and_in_any_order() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    reference, their_x = twin(model, x)
    waiting = []
    for scale in (1, 2, 3):
        (reference(their_x) * scale).sum().backward()
        waiting.append(split.backward_input((model(x) * scale).sum(), None, x)[1])
    for pending in (waiting[1], waiting[2], waiting[0]):
        thread = threading.Thread(target=pending.run)
        thread.start()
        thread.join()
    assert_same_grads(model, reference, rtol=1e-5, atol=1e-5)


def test_an_input_inside_the_graph() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    reference, their_x = twin(model, x)
    theirs, ours = reference.before(their_x), model.before(x)
    (expected,) = torch.autograd.grad(Product.apply(theirs, reference.weight).sum(), theirs, retain_graph=True)
    Product.apply(theirs, reference.weight).sum().backward(inputs=[reference.weight])
    grad, pending = split.backward_input(Product.apply(ours, model.weight).sum(), None, ours)
    pending.run()
    torch.testing.assert_close(grad, expected, **EXACT)
    assert_same_grads(model, reference, **EXACT)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_under_detect_anomaly() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_splits(model, x, waits={"weight"})


def test_preview_says_what_was_learned() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    kinds = [type(each.node).__name__ for each in split.preview(model(x), x).deferred]
    assert "ProductBackward" not in kinds
    assert_splits(model, x, waits={"weight"})
    kinds = [type(each.node).__name__ for each in split.preview(model(x), x).deferred]
    assert "ProductBackward" in kinds


def test_other_functions_of_torch_are_not_tried() -> None:
    """A region that torch.func transforms has a Function of its own for each call."""
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)

    class Vmapped(Product):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.rest = 0

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: Vmapped.apply(row[None], model.weight)[0])(x)

    compare(model, x, call=call, rounds=3)
    assert not [each for each in split.kinds() if each.verdict != "whole"]


def test_a_function_that_each_forward_makes_anew_is_not_tried_for_ever() -> None:
    runs = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        class Anew(Product):
            @staticmethod
            def backward(ctx: Any, *grads: Tensor, runs: list[int] = runs) -> tuple[Tensor | None, ...]:
                runs.append(1)
                return Product.backward(ctx, *grads)

        return Anew.apply(model.before(x), model.weight)

    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    for _ in range(20):
        before = len(runs)
        compare(model, x, call=call, rounds=1)
    assert len(runs) - before == 2  # once, and once for the reference


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # cuBLAS says once that it made a context
@pytest.mark.parametrize("function", [Product, OnCtx, SavesItsOutput])
def test_on_a_gpu(function: Any) -> None:
    model = Around(function, 64).cuda()
    assert_splits(model, torch.randn(32, 64, device="cuda", requires_grad=True), waits={"weight"})


class DrawsOnTheGPU(Product):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return Product.backward(ctx, grads[0] * torch.rand((), device=grads[0].device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # cuBLAS says once that it made a context
def test_random_numbers_of_a_gpu() -> None:
    model, x = Around(DrawsOnTheGPU, 64).cuda(), torch.randn(32, 64, device="cuda", requires_grad=True)
    reference, their_x = twin(model, x)
    for seed in range(3):
        torch.manual_seed(seed)
        reference(their_x).sum().backward()
        torch.manual_seed(seed)
        split.backward_input(model(x).sum(), None, x)[1].run()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-4)
    assert row("DrawsOnTheGPU").why == "draws random numbers"
