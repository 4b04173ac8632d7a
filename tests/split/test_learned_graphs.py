"""Functions that are called in two parts, in graphs of many kinds: equal to a plain backward."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from functions import (
    Around,
    Product,
)
from learning import EXACT, Quantized, assert_splits, compare, learning, row  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, names, twin
from sternway import saved, schedule, split
from sternway.errors import PendingError, SplitError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.split.learned import _effects


class Reweighted(nn.Module):
    """One Function whose weight reaches it in many ways."""

    WAYS = ("as it is", "transposed", "cast", "scaled", "twice", "with others", "and elsewhere", "sum of products")

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.way == "transposed":
            weight = weight.t()
        elif self.way == "cast":
            return Product.apply(x.double(), weight.double()).float()
        elif self.way == "scaled":
            weight = (weight * 0.5).tanh()
        elif self.way == "sum of products":
            weight = weight + self.a @ self.b
        y = Product.apply(x, weight)
        if self.way == "twice":
            y = Product.apply(y.sin(), weight)
        elif self.way == "with others":
            y = y.sin() @ weight
        elif self.way == "and elsewhere":
            y = y + (weight * weight).sum()
        return y


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("way", Reweighted.WAYS)
def test_ways_to_reach_a_weight(way: str, first_stage: bool, hooked: bool, exact: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), Reweighted(way)])
    reference, x = twin(model)[0], torch.randn(5, 4, requires_grad=not first_stage)
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}
    if hooked:
        for name, each in (("ours", model), ("theirs", reference)):
            each[1].weight.register_hook(seen[name].append)
    for _ in range(3):
        outputs = [each[1](each[0](x)).square().sum() for each in (model, reference)]
        inputs = [x] if not first_stage else []
        (theirs,) = torch.autograd.grad(outputs[1], x, retain_graph=True) if inputs else (None,)
        outputs[1].backward(inputs=[p for p in reference.parameters() if p is not None and p.requires_grad])
        grads, pending = split.backward_input(outputs[0], None, inputs, exact=exact)
        pending.run()
        if inputs:
            torch.testing.assert_close(grads[0], theirs, **EXACT)
        assert_same_grads(model, reference, **(EXACT if exact else {"rtol": 1e-5, "atol": 1e-5}))
    for ours, theirs in zip(seen["ours"], seen["theirs"], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert hooked == bool(seen["ours"])
    assert all(each.verdict == "split" for each in split.kinds()) or way in (
        "and elsewhere",
        "scaled",
        "sum of products",
    )


class TwoOutputs(Function):
    """Two outputs, of which one may get no gradient; the backward takes None for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x @ weight, x.sum() * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
        if grads[0] is not None:
            of_x, of_weight = of_x + grads[0] @ weight.t(), of_weight + x.t() @ grads[0]
        if grads[1] is not None:
            of_x, of_weight = of_x + (grads[1] * weight).sum(), of_weight + x.sum() * grads[1]
        return of_x if ctx.needs_input_grad[0] else None, of_weight if ctx.needs_input_grad[1] else None


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_outputs_some_without_a_gradient(used: tuple[int, ...]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.before = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found = TwoOutputs.apply(self.before(x), self.weight)
            return torch.cat([found[index].flatten().sin() for index in used])

    assert_splits(Model(), torch.randn(5, 4, requires_grad=True), waits={"weight"})


def test_under_a_checkpoint_as_many_recomputations() -> None:
    model, x, runs = Around(Product), torch.randn(5, 4, requires_grad=True), []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            runs.append(1)
            return model(x)

        return checkpoint(block, x, use_reentrant=False)

    assert_splits(model, x, waits={"weight"}, call=call)
    assert len(runs) == 4 * 2 * 2


@pytest.mark.parametrize("policy", ["disk", "bf16"])
def test_what_a_policy_packed_stays_packed_until_w(policy: str, tmp_path: Path) -> None:
    model, x = Around(Product, 64), torch.randn(64, 64, requires_grad=True)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        if policy == "bf16":
            with saved.compress("bf16"):
                return model(x)
        with saved.offload(budget=0, to="disk", directory=tmp_path, min_bytes=0):
            return model(x)

    assert_splits(model, x, waits={"weight"}, call=call)


def test_what_waits_can_be_packed() -> None:
    model, x = Around(Product, 64), torch.randn(64, 64, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    reference, their_x = twin(model, x)
    reference(their_x).sum().backward()
    _, pending = split.backward_input(model(x).sum(), None, x)
    before = pending.nbytes
    pending.pack(saved.compress("bf16"))
    assert pending.nbytes < before
    pending.run()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (parameter.grad - other.grad).norm() < 1e-2 * other.grad.norm()


def test_foreign_hooks_and_hooks_on_the_node_keep_it_whole() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = model(x)
    _, pending = split.backward_input(y.sum(), None, x)
    assert "weight" in names(model, pending.ready)
    pending.run()

    seen = []

    def call(model: nn.Module, x: Tensor) -> Tensor:
        y = Product.apply(model.before(x), model.weight)
        y.grad_fn.register_hook(lambda inputs, outputs: seen.append(inputs))
        return y

    pending = compare(model, x, call=call)
    assert "weight" in names(model, pending.ready)
    assert all(grad is not None for grads in seen for grad in grads)


def test_a_hook_on_the_output_changes_what_both_parts_get() -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        y = Product.apply(model.before(x), model.weight)
        y.register_hook(lambda grad: grad * 3)
        return y

    assert_splits(Around(Product), torch.randn(5, 4, requires_grad=True), waits={"weight"}, call=call)


def test_what_w_needs_must_not_change() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    _, pending = split.backward_input(model(x).sum(), None, x)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(PendingError, match="must not be changed in place between I and W"):
        pending.run()


def test_a_second_backward_is_refused() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    y = model(x).sum()
    split.backward_input(y, None, x)[1].run()
    with pytest.raises(SplitError, match="a second time"):
        split.backward_input(y, None, x)


class Cast(Function):
    """As libraries do it under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return grads[0] @ weight.t() if needs[0] else None, x.t() @ grads[0] if needs[1] else None


@pytest.mark.parametrize("function", [Cast, Product])
def test_autocast_is_as_in_i(function: type[Function]) -> None:
    model, x = Around(function), torch.randn(5, 4, requires_grad=True)
    reference, their_x = twin(model, x)
    for cast in (True, True, True, False, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            theirs = reference(their_x).float().square().sum()
            ours = model(x).float().square().sum()
            theirs.backward()  # in the block, as it should not be
            grad, pending = split.backward_input(ours, None, x)
        pending.run()
        torch.testing.assert_close(grad, their_x.grad, **EXACT)
        their_x.grad = None
    assert_same_grads(model, reference, rtol=1e-5, atol=1e-5)
    assert "weight" in names(model, pending.deferred)


class Separate(Function):
    """With setup_context, and vjp in place of backward."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def vjp(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return grads[0] @ weight.t() if needs[0] else None, x.t() @ grads[0] if needs[1] else None


def test_setup_context_and_vjp() -> None:
    assert_splits(Around(Separate), torch.randn(5, 4, requires_grad=True), waits={"weight"})


def test_an_operator_of_torch_library() -> None:
    name = "sternway_test::product"
    with torch.library._scoped_library("sternway_test", "FRAGMENT"):

        @torch.library.custom_op(name, mutates_args=())
        def product(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight

        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            needs = ctx.needs_input_grad
            return grad @ weight.t() if needs[0] else None, x.t() @ grad if needs[1] else None

        product.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

        class Apart:
            apply = staticmethod(product)

        assert_splits(Around(Apart), torch.randn(5, 4, requires_grad=True), waits={"weight"})


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_pipeline_splits_what_was_learned(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=4)
    stages = {index: nn.Sequential(Around(Product), Around(Product)) for index in range(plan.num_stages)}
    whole = nn.Sequential(*(stages[index] for index in sorted(stages)))
    (reference,) = twin(whole)
    pipe = Pipeline(stages, schedule=plan, loss_fn=nn.functional.mse_loss, transport=LocalTransport())
    for _ in range(2):
        x, target = torch.randn(8, 4), torch.randn(8, 4)
        result = pipe.step(x, target=target)
        loss = nn.functional.mse_loss(reference(x), target)
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach())
    assert_same_grads(whole, reference, rtol=1e-4, atol=1e-6)
    assert row("Product").calls > 8


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads try, split and run their own backwards at once; each gets the gradients of its own."""
    monkeypatch.setattr(_effects, "is_alone", lambda: False)
    faults: list[BaseException] = []

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = Around(Product)
            (reference,) = twin(model)
            for _ in range(5):
                x = torch.randn(5, 4, generator=generator).requires_grad_()
                reference(x).square().sum().backward()
                theirs, x.grad = x.grad, None
                grad, pending = split.backward_input(model(x).square().sum(), None, x)
                pending.run()
                torch.testing.assert_close(grad, theirs, **EXACT)
            assert_same_grads(model, reference, rtol=1e-5, atol=1e-5)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
