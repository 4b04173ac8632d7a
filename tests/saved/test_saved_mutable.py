"""In-place changes to saved tensors, of every kind; each case beside a copy that nobody changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from saved_steps import moving
from torch import Tensor

from sternway import saved
from sternway.dropin import autograd_graph
from sternway.errors import SavedError


def _modify(changes: bool, function: Callable[[], Any]) -> None:
    if changes:
        function()


# Each case computes a loss from ``a``; ``changes`` says whether saved tensors are then changed in place. The gradient
# must be the same either way.


def basic(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b**2).sum()
    _modify(changes, b.sin_)
    return loss


def views(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    c = b.view(-1)
    loss = (c**2).sum() + (b[1] * b[0]).sum()
    _modify(changes, lambda: b[1].sin_())
    return loss


def save_base_and_modify_view(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    c = b[:1]
    loss = (b**2).sum()
    _modify(changes, c.sin_)
    _modify(changes, lambda: c.mul_(3))
    return loss


def save_view_and_modify_base(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    c = b[1:]
    loss = (c**2).sum()
    _modify(changes, lambda: b.sin_())
    return loss


def another_view_of_the_same_base(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b[1] ** 2).sum()
    _modify(changes, lambda: b.t()[0].zero_())
    return loss


def saved_but_not_any_more(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    (b**2).sum().backward(inputs=[a])
    a.grad = None
    _modify(changes, b.sin_)
    return (a * 2).sum()


def the_same_tensor_many_times(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b**2 + b * b + b.exp() * b).sum()
    _modify(changes, b.sin_)
    _modify(changes, b.cos_)
    return loss


def different_versions(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b**2).sum()
    b = b.sin_() if changes else b.sin()
    loss = loss + (b**2).sum()
    b = b.sin_() if changes else b.sin()
    return loss + (b**2).sum()


def mathematical_views(a: Tensor, changes: bool) -> Tensor:
    b = (a * 1j).clone()
    c = b.conj()
    loss = (c * c).abs().sum()
    _modify(changes, c.sin_)
    return loss


def out_variant(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b**2).sum()
    _modify(changes, lambda: torch.sin(a.detach(), out=b.detach()))
    return loss


def several_outs(a: Tensor, changes: bool) -> Tensor:
    b, places = a.clone(), torch.zeros(3, dtype=torch.long)
    c = b[:, 0]
    loss = (c**2).sum()
    _modify(changes, lambda: torch.max(a.detach(), 1, out=(c.detach(), places)))
    return loss


def foreach(a: Tensor, changes: bool) -> Tensor:
    b, c = a.clone(), a.clone()
    loss = (b**2).sum() + (c**3).sum()
    _modify(changes, lambda: torch._foreach_mul_([b.detach(), c.detach()], 5.0))
    return loss


def under_no_grad(a: Tensor, changes: bool) -> Tensor:
    b = a.clone()
    loss = (b**2).sum()
    with torch.no_grad():
        _modify(changes, b.zero_)
        _modify(changes, lambda: b.copy_(a))
        _modify(changes, lambda: b.index_fill_(0, torch.tensor([0]), 7))
    return loss


def a_weight_before_its_backward(a: Tensor, changes: bool) -> Tensor:
    loss = (a @ a.t()).sum()
    with torch.no_grad():
        _modify(changes, lambda: a.sub_(0.5))  # an optimizer that is early
    return loss


CASES = [
    basic,
    views,
    save_base_and_modify_view,
    save_view_and_modify_base,
    another_view_of_the_same_base,
    saved_but_not_any_more,
    the_same_tensor_many_times,
    different_versions,
    mathematical_views,
    out_variant,
    several_outs,
    foreach,
    under_no_grad,
    a_weight_before_its_backward,
]
WAYS: dict[str, Callable[[], list[AbstractContextManager[Any]]]] = {
    "alone": lambda: [saved.mutable()],
    "nested": lambda: [saved.mutable(), saved.mutable()],
    "drop-in": lambda: [autograd_graph.allow_mutation_on_saved_tensors()],
    "moved": lambda: [saved.mutable(), moving()],
    "resident": lambda: [moving(budget=10**6), saved.mutable()],
    "lossless codec around": lambda: [saved.compress("bf16", min_bytes=10**6), saved.mutable()],
}


def _grad(case: Callable[[Tensor, bool], Tensor], changes: bool, *around: AbstractContextManager[Any]) -> Tensor:
    torch.manual_seed(0)
    a = torch.rand(3, 4, requires_grad=True)
    first, second = (*around, nullcontext(), nullcontext())[:2]
    with first, second:
        loss = case(a, changes)
    loss.backward()
    assert a.grad is not None
    return a.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_does_not_change_the_gradient(case: Callable[[Tensor, bool], Tensor], way: str) -> None:
    assert torch.equal(_grad(case, True, *WAYS[way]()), _grad(case, False))


@pytest.mark.parametrize("case", [basic, views, foreach, out_variant], ids=lambda case: case.__name__)
def test_without_the_policy_it_is_an_error(case: Callable[[Tensor, bool], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _grad(case, True)
    with pytest.raises(SavedError, match=r"modified by an inplace operation.*saved\.mutable\(\)"):
        _grad(case, True, saved.keep())


def test_double_backward() -> None:
    a = torch.rand(3, requires_grad=True)
    with saved.mutable():
        b = a.clone()
        loss = (b**3).sum()
        (grad,) = torch.autograd.grad(loss, a, create_graph=True)
        second = grad.sum()
        b.zero_()
        (twice,) = torch.autograd.grad(second, a)
    torch.testing.assert_close(twice, 6 * a)


def test_a_change_outside_the_block_is_still_an_error() -> None:
    a = torch.rand(3, requires_grad=True)
    with saved.mutable():
        b = a.clone()
        loss = (b**2).sum()
    b.sin_()
    with pytest.raises(SavedError, match="modified by an inplace operation"):
        loss.backward()


def test_a_change_in_a_later_block_is_seen_by_the_same_policy() -> None:
    a, policy = torch.rand(3, requires_grad=True), saved.mutable()
    with policy:
        b = a.clone()
        loss = (b**2).sum()
    with policy:
        b.sin_()
    loss.backward()
    assert torch.equal(a.grad, 2 * a)  # type: ignore[arg-type]


def test_several_views_cost_one_copy() -> None:
    a = torch.rand(1000, requires_grad=True)
    with saved.mutable() as report:
        b = a.clone()
        loss = (b[:500] * b[500:]).sum() + (b**2).sum()
        b.zero_()
        assert report.peak_bytes == 4000
    loss.backward()
    assert report.deduplicated_bytes == 2000 + 4000


def test_nothing_is_copied_if_nothing_is_changed() -> None:
    a = torch.rand(5, requires_grad=True)
    policy = saved.mutable()
    with policy:
        b = a.clone()
        loss = (b**2).sum()
        assert b.grad_fn is not None
        saved_by = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert saved_by._saved_self.data_ptr() == b.data_ptr()
        b.zero_()
        assert saved_by._saved_self.data_ptr() != b.data_ptr()
    del loss, saved_by
    assert len(policy.slots) == 0


@pytest.mark.parametrize("also", [nullcontext, lambda: saved.compress("bf16")])
def test_saved_before_and_after_a_change_that_no_version_counts(also: Callable[[], AbstractContextManager]) -> None:
    x = torch.ones(3, requires_grad=True)
    with also(), saved.mutable():
        y = 2 * x
        before = (y**2).sum()
        y.data.fill_(8)
        after = (y**2).sum()
    (before + after).backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2 * 2 * (2.0 + 8.0)))
