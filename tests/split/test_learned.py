"""Which Functions are called in two parts: found by a trial, and right whatever it finds."""

from __future__ import annotations

import random
import re
from itertools import accumulate, cycle
from typing import Any

import pytest
import torch
from dishonest import HIDDEN, WHOLE, Calls, Differs
from functions import (
    Around,
    FusedLoss,
    FusedLossInPlace,
    Product,
    RecomputedLoss,
    RMSNorm,
)
from learning import EXACT, Quantized, assert_splits, compare, learning, row  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.autograd import Function

from compare import assert_same_grads, names, twin
from sternway import split
from sternway.errors import PendingError, SplitError
from sternway.split.learned import _record, _try


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_few_bits(bias: bool, first_stage: bool) -> None:
    model = Quantized(bias)
    waits = {"layer.weight", "layer.bias"} if bias else {"layer.weight"}
    assert_splits(model, torch.randn(5, 8, requires_grad=not first_stage), waits=waits)
    found = row("QuantizedLinear")
    assert (found.verdict, found.exact, found.why) == ("split", True, "")
    assert found.waiting == ((1, 2) if bias else (1,))
    assert found.calls == 3
    assert found.held > 0


class LossModel(nn.Module):
    def __init__(self, function: type[Function], scale: float = 1.0) -> None:
        super().__init__()
        self.function, self.scale = function, scale
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(len(x)) % 9
        return self.function.apply(self.body(x), self.head.weight, target) * self.scale


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_loss_that_has_its_gradients_from_the_forward_stays_whole(scale: float) -> None:
    model, x = LossModel(FusedLoss, scale), torch.randn(5, 6, requires_grad=True)
    pending = compare(model, x, rounds=3)
    assert names(model, pending.ready) == {"head.weight"}
    assert row("FusedLoss").why == "does not do as needs_input_grad says"


def test_a_loss_that_scales_its_saved_gradients_in_place_stays_whole() -> None:
    model, x = LossModel(FusedLossInPlace, 0.5), torch.randn(5, 6, requires_grad=True)
    pending = compare(model, x, rounds=3, rtol=1e-5, atol=1e-6)
    assert names(model, pending.ready) == {"head.weight"}
    assert row("FusedLossInPlace").why == "changes tensors in place, by a kernel that autograd does not see"


def test_a_loss_that_computes_its_logits_again_is_split() -> None:
    assert_splits(LossModel(RecomputedLoss), torch.randn(5, 6, requires_grad=True), waits={"head.weight"})


def test_a_norm_stays_whole() -> None:
    layer = nn.RMSNorm(6)
    pending = compare(layer, torch.randn(5, 6, requires_grad=True), call=lambda m, x: RMSNorm.apply(x, m.weight, 1e-6))
    assert not pending.deferred
    assert row("RMSNorm").why == "its weights are vectors"


@pytest.mark.parametrize("function", WHOLE, ids=lambda function: function.__name__)
def test_what_must_stay_whole_does_and_leaves_what_a_plain_backward_leaves(function: Any) -> None:
    model, x, rounds = Around(function), torch.randn(5, 4, requires_grad=True), 4
    reference, their_x = twin(model, x)
    Calls.count = 0
    HIDDEN.zero_()
    for seed in range(rounds):
        grad = torch.randn(5, 4)
        torch.manual_seed(seed)
        random.seed(seed)
        reference(their_x).backward(grad)
        states = torch.get_rng_state(), random.getstate()
        torch.manual_seed(seed)
        random.seed(seed)
        mine, pending = split.backward_input(model(x), grad, x)
        pending.run()
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        torch.testing.assert_close(mine, their_x.grad, **EXACT)
        their_x.grad = None
        assert "weight" in names(model, pending.ready)
    assert_same_grads(model, reference)
    torch.testing.assert_close(model.weight.main_grad, reference.weight.main_grad, **EXACT)
    found = row(function.__name__)
    assert found.verdict == "whole"
    assert re.search(function.why, found.why), found.why
    if function.__name__ == "CountsElsewhere":
        assert Calls.count == 2 * rounds
    if function.__name__ == "AddsToAHiddenTensor":
        assert HIDDEN.item() == 2 * rounds


def test_what_differs_from_call_to_call_stays_whole() -> None:
    model, x = Around(Differs), torch.randn(5, 4, requires_grad=True)
    for _ in range(3):
        _, pending = split.backward_input(model(x).sum(), None, x)
        assert "weight" in names(model, pending.ready)
        pending.run()
    assert row("Differs").why == "is not deterministic"


def test_one_that_gains_nothing_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    monkeypatch.setattr(_try, "clock", accumulate(cycle([0, 2, 0, 2, 0, 2])).__next__)
    pending = compare(model, x, rounds=3)
    assert "weight" in names(model, pending.ready)
    assert (row("Product").verdict, row("Product").why) == ("whole", "gains nothing")


@pytest.mark.parametrize(
    ("whole", "inputs", "weights", "gains"),
    [(2, 1, 1, True), (2, 1.5, 1, True), (2, 1.6, 1, False), (2, 2, 0.1, False), (2, 1.9, 0.2, True)],
)
def test_what_is_a_gain(whole: float, inputs: float, weights: float, gains: bool) -> None:
    assert split.PartTimes(whole, inputs, weights).gains is gains


def test_nothing_is_tried_unless_it_is_named() -> None:
    split.unlearn(Function)
    Calls.count = 0
    counts = next(each for each in WHOLE if each.__name__ == "CountsElsewhere")
    model, x = Around(counts), torch.randn(5, 4, requires_grad=True)
    compare(model, x, rounds=3)
    assert Calls.count == 6
    found = row("CountsElsewhere")
    assert (found.verdict, found.why) == ("untried", "not tried: see split.learn")
    split.learn(Function)
    split.unlearn(counts)
    compare(model, x, rounds=3)
    assert Calls.count == 12


def test_a_function_can_be_forgotten() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    pending = compare(model, x)
    assert "weight" in names(model, pending.deferred)
    split.unlearn(Product)
    pending = compare(model, x)
    assert "weight" in names(model, pending.ready)


@pytest.mark.parametrize("wrong", [nn.Linear, "Product", torch.ones(1)])
def test_only_functions_can_be_learned(wrong: Any) -> None:
    with pytest.raises(SplitError, match="take classes of autograd Functions"):
        split.learn(wrong)
    with pytest.raises(SplitError, match="take classes of autograd Functions"):
        split.unlearn(wrong)


def test_gradients_that_were_none_in_the_trial_are_another_form() -> None:
    """The verdict of one form is not used for another."""
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    assert_splits(model, x, waits={"weight"})
    calls = row("Product").calls
    larger = torch.randn(7, 4, requires_grad=True)
    pending = compare(model, larger, rounds=1)
    assert "weight" in names(model, pending.ready)  # tried again, whole
    assert row("Product").calls == calls
    compare(model, larger, rounds=1)
    assert row("Product").calls == calls + 1


def test_more_forms_than_are_tried_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_record, "MOST_FORMS", 2)
    model = Around(Product)
    for rows in (3, 4, 5, 5):
        pending = compare(model, torch.randn(rows, 4, requires_grad=True), rounds=1)
    assert "weight" in names(model, pending.ready)
    pending = compare(model, torch.randn(3, 4, requires_grad=True), rounds=1)
    assert "weight" in names(model, pending.deferred)


class ChangesLater(Product):
    """Honest, until a number in its input says otherwise."""

    way = ""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = Product.backward(ctx, *grads)
        needs, way = ctx.needs_input_grad, ChangesLater.way
        if way == "ignores":
            return grads[0] @ weight.t(), x.t() @ grads[0]
        if way == "raises" and needs != (True, True):
            raise RuntimeError("called alone")
        if way == "draws" and of_x is not None:
            return of_x * torch.rand(()), of_weight
        if way == "changes" and needs[0]:
            x.add_(1)
        if way == "draws in W" and not needs[0]:
            torch.rand(())
        if way == "leaves out" and not needs[0]:
            return None, None
        return of_x, of_weight


@pytest.mark.parametrize("way", ["ignores", "draws", "raises"])
def test_a_part_that_does_not_do_as_in_the_trial_is_called_whole(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Around(ChangesLater), torch.randn(5, 4, requires_grad=True)
    monkeypatch.setattr(ChangesLater, "way", "")
    assert_splits(model, x, waits={"weight"})
    monkeypatch.setattr(ChangesLater, "way", way)
    reference, their_x = twin(model, x)
    for seed in range(2):
        torch.manual_seed(seed)
        reference(their_x).sum().backward()
        torch.manual_seed(seed)
        grad, pending = split.backward_input(model(x).sum(), None, x)
        pending.run()
        torch.testing.assert_close(grad, their_x.grad, **EXACT)
        their_x.grad = None
        assert "weight" in names(model, pending.ready)
    assert_same_grads(model, reference)
    assert row("ChangesLater").why == "raised, drew random numbers or returned other gradients than when it was tried"


@pytest.mark.parametrize("way", ["changes", "draws in W", "leaves out"])
def test_a_part_that_cannot_be_mended_is_an_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Around(ChangesLater), torch.randn(5, 4, requires_grad=True)
    monkeypatch.setattr(ChangesLater, "way", "")
    assert_splits(model, x, waits={"weight"})
    monkeypatch.setattr(ChangesLater, "way", way)
    y = model(x).sum()
    if way == "changes":
        with pytest.raises(SplitError, match=r"must not change tensors in place; got ChangesLater.* split.unlearn"):
            split.backward_input(y, None, x)
        return
    _, pending = split.backward_input(y, None, x)
    with pytest.raises(PendingError, match=r"weights' part of a backward must .* got ChangesLater.* split.unlearn"):
        pending.run()


def test_gradients_of_zeros_or_nan_teach_nothing() -> None:
    model, x = Around(Product), torch.randn(5, 4, requires_grad=True)
    for factor in (0.0, float("nan"), float("inf")):
        _, pending = split.backward_input(model(x).sum() * factor, None, x)
        pending.run()
    assert (row("Product").verdict, row("Product").calls) == ("untried", 0)
    model.zero_grad()
    assert_splits(model, x, waits={"weight"})


class Rounds(Product):
    """Its weight gradient is rounded otherwise when it is computed alone."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = Product.backward(ctx, *grads)
        if of_x is None and of_weight is not None:
            of_weight = of_weight * (1 + 2**-22)
        return of_x, of_weight


def test_rounding_may_be_allowed() -> None:
    model, x = Around(Rounds), torch.randn(5, 4, requires_grad=True)
    compare(model, x)
    assert row("Rounds").why == "computes other gradients for its weights alone"
    split.learn(Rounds, exact=False)
    pending = compare(model, x)
    assert "weight" in names(model, pending.deferred)
    assert (row("Rounds").verdict, row("Rounds").exact) == ("split", False)
    _, pending = split.backward_input(model(x).sum(), None, x, exact=True)
    assert "weight" in names(model, pending.ready)
    pending.run()


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_try, "clock", accumulate(cycle([0, 2, 0, 1, 0, 1])).__next__)  # whole, inputs, weights
    assert str(split.kinds()) == "no custom Function with weights was met"
    x = torch.randn(5, 4, requires_grad=True)
    for function in (Product, WHOLE[0]):
        compare(Around(function), x)
    lines = str(split.kinds()).splitlines()
    head = ["Function", "waits", "(I", "+", "W)", "/", "whole", "W", "/", "whole", "bits", "held", "calls"]
    assert lines[0].split() == head
    assert lines[1].split()[:6] == ["functions.Product", "1", "split", "1.00", "0.50", "equal"]
    assert lines[2].split(maxsplit=3)[::3] == ["dishonest.Ignores", "does not do as needs_input_grad says"]
    assert len(split.kinds()) == 2
