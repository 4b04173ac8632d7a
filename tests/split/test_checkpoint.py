"""Activation checkpointing: as many recomputations as a plain backward makes, and the products still wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import gpt
from shapes import BRANCHES, Derived, Frozen, inputs
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compare import assert_same_grads, assert_split_equals_backward, names, twin
from sternway import split
from sternway._torch.saved_hooks import can_share_recomputation, recomputation
from sternway.errors import SplitError


class Checkpointed(nn.Module):
    """Blocks under a checkpoint each; counts how often a block's forward runs."""

    def __init__(self, blocks: nn.Module, **options: object) -> None:
        super().__init__()
        self.blocks, self.options = blocks, options
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self._count, block, x, **self.options)
        return x

    def _count(self, block: nn.Module, x: Tensor) -> Tensor:
        self.runs += 1
        return block(x)


def _policy(context: object, op: object, *arguments: object, **keywords: object) -> CheckpointPolicy:
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


OPTIONS = {
    "plain": {},
    "whole region": {"early_stop": False},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _policy)},
}


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("options", OPTIONS)
def test_recomputes_as_often_as_a_plain_backward(options: str, first_stage: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(gpt(16, 3), use_reentrant=False, **OPTIONS[options])
    x = torch.randn(2, 5, 16, requires_grad=not first_stage)
    model(x).sum().backward()
    plain_runs = model.runs
    model.zero_grad()
    x.grad, model.runs = None, 0

    pending = assert_split_equals_backward(model, x, rounds=1, rtol=1e-4, atol=1e-5)
    assert model.runs == plain_runs == 6
    products = {name for name, _ in model.named_parameters() if "norm" not in name}
    assert names(model, pending.deferred) == products


def test_nested_checkpoints() -> None:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    model = nn.ModuleList(inner)

    def call(model: nn.ModuleList, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
            return x.sin()

        return checkpoint(outer, x, use_reentrant=False)

    pending = assert_split_equals_backward(model, torch.randn(5, 4, requires_grad=True), call=call)
    assert len(pending.deferred) == 8


def test_dropout_is_recomputed_with_the_same_mask() -> None:
    model = Checkpointed(
        nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))]), use_reentrant=False
    )
    assert_split_equals_backward(model, torch.randn(5, 8, requires_grad=True))


def test_a_convolution_under_a_checkpoint() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3))
    pending = assert_split_equals_backward(
        model,
        torch.randn(2, 3, 6, 6, requires_grad=True),
        call=lambda m, x: checkpoint(m, x, use_reentrant=False),
        rtol=1e-4,
        atol=1e-5,
    )
    assert {"0.weight", "3.weight"} <= names(model, pending.deferred)


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [Derived, Frozen, *BRANCHES.values()])
def test_weights_derived_from_others_wait(make: Callable[[], nn.Module], options: str, first_stage: bool) -> None:
    """W goes through what the region recomputed in I; it is recomputed once, as in a plain backward."""
    model, (x, ids) = make(), inputs(needs=not first_stage)
    runs = 0

    def region(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return model(x, ids)

    def call(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(region, model, x, ids, use_reentrant=False, **OPTIONS[options])

    pending = assert_split_equals_backward(model, x, ids, call=call, rtol=1e-4, atol=1e-5)
    assert runs == 8  # two rounds, ours and the reference, forward and recomputation
    plain = split.backward_input(model(x, ids), torch.ones_like(model(x, ids)), [x])[1]
    assert names(model, pending.deferred) == names(model, plain.deferred)
    assert pending.deferred


def test_a_derived_weight_under_nested_checkpoints() -> None:
    model, (x, ids) = Derived(), inputs()

    def call(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return checkpoint(model, x.sin(), ids, use_reentrant=False).cos()

        return checkpoint(outer, x, use_reentrant=False)

    pending = assert_split_equals_backward(model, x, ids, call=call, rtol=1e-4, atol=1e-5)
    assert len(pending.deferred) == len(list(model.parameters()))


def test_two_pendings_of_checkpointed_regions_run_in_any_order() -> None:
    model, batches = Derived(), [inputs(), inputs()]
    reference = twin(model)[0]
    pendings = []
    for x, ids in batches:
        reference(x, ids).square().sum().backward()
        loss = checkpoint(model, x, ids, use_reentrant=False).square().sum()
        pendings.append(split.backward_input(loss, None, x)[1])
    for pending in pendings:
        pending.run()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not can_share_recomputation(), reason="this torch has no GraphExecGroup")
def test_a_group_of_the_users_own() -> None:
    """torch has one group at a time; W sets its own, and puts theirs back."""
    model, (x, ids) = Derived(), inputs()
    reference, their_x = twin(model, x)
    reference(their_x, ids).sum().backward()
    theirs = recomputation()  # torch.utils.checkpoint.GraphExecGroup()
    with theirs:
        _, pending = split.backward_input(checkpoint(model, x, ids, use_reentrant=False).sum(), None, x)
        pending.run()
    with recomputation() as another:
        _, pending = split.backward_input(checkpoint(model, x, ids, use_reentrant=False).sum(), None, x)
    with theirs:
        pending.run()
        assert recomputation() is theirs
    assert recomputation() not in (theirs, another)
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)


class _Look(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.function()
        return grads[0], None


def test_what_was_recomputed_and_w_does_not_need_is_freed_as_i_goes_on() -> None:
    """A weight that is cast anew in each use, as under autocast."""
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    casts: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def look() -> None:
        alive.append(sum(cast() is not None for cast in casts))

    def region(x: Tensor) -> Tensor:
        for weight in weights:
            cast = weight.double()
            casts.append(weakref.ref(cast.untyped_storage()))
            x = _Look.apply(x, look) @ cast
            del cast
        return x

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    _, pending = split.backward_input(checkpoint(region, x, use_reentrant=False).sum(), None, x)
    pending.run()
    assert alive == [2, 1, 0]


def test_reentrant_is_refused_before_anything_is_computed() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(SplitError, match=r"use_reentrant=True\) in the forward. Fix: pass use_reentrant=False"):
        split.backward_input(y.sum(), None, x)
    y.sum().backward()
    assert layer.weight.grad is not None
