"""The four names of ``torch.autograd.graph`` for saved tensors: each behaviour that torch documents, in both."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from saved_steps import moving
from torch import Tensor
from torch.autograd import graph as torchs

from sternway import saved
from sternway.dropin import autograd_graph as ours
from sternway.errors import SavedError

both = pytest.mark.parametrize("graph", [torchs, ours], ids=["torch", "sternway"])


@both
def test_hooks_see_what_is_saved_and_give_it_back(graph: ModuleType) -> None:
    seen: list[str] = []

    def pack(x: Tensor) -> Tensor:
        seen.append("pack")
        return x.detach()

    def unpack(x: Tensor) -> Tensor:
        seen.append("unpack")
        return x

    a = torch.ones(5, requires_grad=True)
    b = torch.ones(5, requires_grad=True) * 2
    with graph.saved_tensors_hooks(pack, unpack) as given:
        y = a * b
    assert given is None
    assert seen == ["pack", "pack"]
    y.sum().backward()
    assert seen == ["pack", "pack", "unpack", "unpack"]
    assert torch.equal(a.grad, torch.full((5,), 2.0))  # type: ignore[arg-type]


@both
def test_what_is_packed_need_not_be_a_tensor(graph: ModuleType) -> None:
    a = torch.rand(5, requires_grad=True)
    with graph.saved_tensors_hooks(lambda x: x.tolist(), torch.tensor):
        y = a.exp().sum()
    y.backward()
    torch.testing.assert_close(a.grad, a.exp())


@both
def test_hooks_see_custom_functions(graph: ModuleType) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    a = torch.rand(5, requires_grad=True)
    with graph.saved_tensors_hooks(lambda x: x.detach() * 10, lambda x: x / 10):
        y = Double.apply(a).sum()
    y.backward()
    torch.testing.assert_close(a.grad, 2 * a)


@both
def test_only_the_innermost_pair_is_applied(graph: ModuleType) -> None:
    a = torch.ones(3, requires_grad=True)
    outer: list[Tensor] = []
    with (
        graph.saved_tensors_hooks(lambda x: outer.append(x), lambda x: x),
        graph.saved_tensors_hooks(lambda x: x.detach() * 3, lambda x: x),
    ):
        y = a.exp().sum()
    y.backward()
    assert outer == []
    torch.testing.assert_close(a.grad, 3 * a.exp())


@both
def test_a_pack_hook_may_not_change_its_input(graph: ModuleType) -> None:
    a = torch.ones(3, requires_grad=True) * 1
    with (
        pytest.raises(RuntimeError, match="pack hook is modifying its input in place"),
        graph.saved_tensors_hooks(lambda x: x.add_(1), lambda x: x),
    ):
        a.exp()


@both
def test_an_unpack_hook_returns_a_tensor(graph: ModuleType) -> None:
    a = torch.ones(3, requires_grad=True)
    with graph.saved_tensors_hooks(lambda x: 5, lambda x: x):
        y = a.exp().sum()
    with pytest.raises(TypeError, match="expected to be a Tensor"):
        y.backward()


@both
def test_errors_in_hooks_come_through(graph: ModuleType) -> None:
    def fail(x: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    a = torch.ones(3, requires_grad=True)
    with pytest.raises(ZeroDivisionError, match="on purpose"), graph.saved_tensors_hooks(fail, lambda x: x):
        a.exp()
    with graph.saved_tensors_hooks(lambda x: x.detach(), fail):
        y = a.exp().sum()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        y.backward()
    a.exp()  # and the hooks are gone


@both
def test_no_cycle_through_the_packed_object(graph: ModuleType) -> None:
    gc.disable()
    try:
        with graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
            y = torch.ones(3, requires_grad=True).exp()
        reference = weakref.ref(y)
        del y
        assert reference() is None
    finally:
        gc.enable()


@both
def test_a_pair_can_be_subclassed_and_entered_again(graph: ModuleType) -> None:
    class Count(graph.saved_tensors_hooks):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.count = 0
            super().__init__(self.pack, lambda x: x)

        def pack(self, x: Tensor) -> Tensor:
            self.count += 1
            return x.detach()

    counter = Count()
    for _ in range(2):
        with counter:
            torch.ones(3, requires_grad=True).exp()
    assert counter.count == 2


@both
def test_save_on_cpu_on_the_cpu_copies_nothing(graph: ModuleType) -> None:
    for pin_memory in (False,):
        a = torch.rand(5, requires_grad=True)
        with graph.save_on_cpu(pin_memory=pin_memory):
            b = a * 2
            y = (b * b).sum()
        y.backward()
        torch.testing.assert_close(a.grad, 8 * a)


def test_save_on_cpu_takes_torchs_arguments_and_can_be_entered_again() -> None:
    context = ours.save_on_cpu(pin_memory=True, device_type="cuda")
    a = torch.rand(5, requires_grad=True)
    for _ in range(2):
        with context:
            y = a.exp().sum()
        y.backward()
    torch.testing.assert_close(a.grad, 2 * a.exp())


@both
def test_disabled_hooks_are_refused_with_the_message(graph: ModuleType) -> None:
    a = torch.ones(3, requires_grad=True)
    with graph.disable_saved_tensors_hooks("not here"):
        a.exp().sum().backward()  # saving itself goes on
        with pytest.raises(RuntimeError, match=r"^not here$"), graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            pass
        with pytest.raises(RuntimeError, match=r"^not here$"), graph.save_on_cpu():
            pass
        with (
            graph.disable_saved_tensors_hooks("nor here"),
            pytest.raises(RuntimeError, match=r"^nor here$"),
            graph.save_on_cpu(),
        ):
            pass
        with pytest.raises(RuntimeError, match=r"^not here$"), torchs.save_on_cpu():
            pass
    with graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        a.exp()


@both
def test_disabling_inside_hooks_is_refused_too(graph: ModuleType) -> None:
    with (
        graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x),
        pytest.raises(RuntimeError, match=r"^too late$"),
        graph.disable_saved_tensors_hooks("too late"),
    ):
        pass
    torch.ones(3, requires_grad=True).exp()


@pytest.mark.filterwarnings("ignore:saved.offload moved nothing")
def test_forbid_refuses_every_policy() -> None:
    for policy in (saved.compress("int8"), saved.keep(), saved.mutable(), moving(), saved.offload()):
        with saved.forbid("not here"), pytest.raises(SavedError, match=r"^not here$"), policy:
            pass
        with policy:  # and leaves it as it was
            torch.ones(3, requires_grad=True).exp()


@both
def test_mutation_is_allowed_in_the_block(graph: ModuleType) -> None:
    with graph.allow_mutation_on_saved_tensors():
        a = torch.ones(2, 3, requires_grad=True)
        b = a.clone()
        out = (b**2).sum()
        b.sin_()
        out.sum().backward()
    assert torch.equal(a.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


def test_where_ours_goes_on_and_torchs_stops() -> None:
    """A backward after the block, blocks in blocks, and a view at another offset: errors, or wrong, in torch."""
    a = torch.ones(2, 3, requires_grad=True)
    with ours.allow_mutation_on_saved_tensors(), ours.allow_mutation_on_saved_tensors():
        b = a.clone()
        out = (b**2).sum()
        b[1].sin_()
    out.backward()
    assert torch.equal(a.grad, torch.full((2, 3), 2.0))  # type: ignore[arg-type]


def test_what_a_pair_returns_goes_on_to_the_policies() -> None:
    a = torch.rand(50, requires_grad=True)
    policy = moving(window=0)
    with policy as report, ours.saved_tensors_hooks(lambda x: x.detach().half(), lambda x: x.float()):
        y = a.exp().sum()
    y.backward()
    assert report.moved_bytes == 100
    torch.testing.assert_close(a.grad, a.exp().half().float())


def test_a_pair_of_torchs_inside_a_policy_is_obeyed_alone() -> None:
    """torch's hooks know nothing of ours: the innermost pair is theirs."""
    a = torch.rand(50, requires_grad=True)
    with moving() as report, torchs.saved_tensors_hooks(lambda x: x.detach(), lambda x: x):
        y = a.exp().sum()
    y.backward()
    assert report.packed_bytes == 0
