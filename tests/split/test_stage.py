"""torch's three functions under their own names: beside torch's where torch is right, and where it is not."""

from __future__ import annotations

import inspect

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import _backward as theirs
from torch.distributed.pipelining import stage

from compare import assert_same_grads, twin
from sternway import split
from sternway._torch import parallel, require
from sternway.dropin import pipelining_backward
from sternway.errors import SplitError, UnsupportedTorch


def test_dropin_has_the_same_functions() -> None:
    for name in pipelining_backward.__all__:
        assert getattr(pipelining_backward, name) is getattr(split, name)
        assert hasattr(theirs, name)


@pytest.mark.parametrize("loss", [False, True], ids=["middle", "last"])
def test_equals_torch(loss: bool) -> None:
    torch.manual_seed(0)
    model = gpt(8, 2, heads=2)
    x = torch.randn(2, 4, 8, requires_grad=True)
    reference, their_x = twin(model, x)
    grads = None if loss else [torch.randn(2, 4, 8)]

    def halves(module: object, model: nn.Module, x: Tensor) -> tuple:
        y = model(x).square().mean() if loss else model(x)
        dinputs, groups = module.stage_backward_input([y], grads, [x], model.parameters())
        assert not y.requires_grad  # detached, so that the graph can go
        return dinputs, module.stage_backward_weight(model.parameters(), groups)

    (dx,), weights = halves(split, model, x)
    (their_dx,), _ = halves(theirs, reference, their_x)
    torch.testing.assert_close(dx, their_dx)
    torch.testing.assert_close(x.grad, their_x.grad)
    assert all(given is parameter.grad for given, parameter in zip(weights, model.parameters(), strict=True))
    assert_same_grads(model, reference)


def test_whole_backward_equals_torch() -> None:
    model = gpt(8, 1, heads=2)
    x = torch.randn(2, 4, 8, requires_grad=True)
    reference, their_x = twin(model, x)
    g = torch.randn(2, 4, 8)

    def outputs(model: nn.Module, x: Tensor) -> dict:
        y = model(x)
        return {"a": (y, 3), "b": [y.sin(), x.detach()]}

    grads = {"a": (g, None), "b": [g, None]}
    found = split.stage_backward(outputs(model, x), grads, [x, "text"])
    expected = theirs.stage_backward(outputs(reference, their_x), grads, [their_x, "text"])
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] is expected[1] is None
    assert x.grad is None
    assert_same_grads(model, reference)


def test_whole_backward_of_chosen_outputs() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    y = layer(x)
    (found,) = split.stage_backward([y, y.sin()], [None, torch.ones(5, 4)], [x], [1])
    (expected,) = torch.autograd.grad(layer(x).sin().sum(), x)
    torch.testing.assert_close(found, expected)


def test_outputs_that_are_views_which_torch_refuses() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    g = torch.randn(20)
    with pytest.raises(RuntimeError, match=r"Failed to run stage backward input|detach views"):
        theirs.stage_backward_input([layer(x).view(-1)], [g], [x], layer.parameters())
    x.grad = None
    (dx,), groups = split.stage_backward_input([layer(x).view(-1)], [g], [x], layer.parameters())
    split.stage_backward_weight(layer.parameters(), groups)
    reference, their_x = twin(layer, x)
    reference(their_x).view(-1).backward(g)
    torch.testing.assert_close(dx, their_x.grad)
    assert_same_grads(layer, reference)


def test_inputs_without_gradient_and_outputs_without_graph() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4)
    assert split.stage_backward_input([x], None, [x, 1], layer.parameters()) == ((None, None), [])
    dinputs, groups = split.stage_backward_input([layer(x), x], [torch.ones(5, 4), None], [x, "a"], layer.parameters())
    assert dinputs == (None, None)
    split.stage_backward_weight(layer.parameters(), groups)
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 5.0))


@pytest.mark.parametrize("in_halves", [True, False], ids=["halves", "whole"])
def test_outputs_that_were_freed_after_they_were_sent(in_halves: bool) -> None:
    """torch 2.15 keeps an edge in place of an output that has been sent, and None where there is nothing to keep."""
    model, g = gpt(8, 1, heads=2), torch.randn(2, 4, 8)
    x = torch.randn(2, 4, 8, requires_grad=True)
    reference, their_x = twin(model, x)
    y = reference(their_x)
    torch.autograd.backward([y, y.sin()], [g, 2 * g])

    y = model(x)
    outputs, grads = [get_gradient_edge(y), None, y.sin()], [g, None, 2 * g]
    del y
    if in_halves:
        (dx,), groups = split.stage_backward_input(outputs, grads, [x], model.parameters())
        split.stage_backward_weight(model.parameters(), groups)
    else:
        (dx,) = split.stage_backward(tuple(outputs), tuple(grads), [x])
    torch.testing.assert_close(dx, their_x.grad)
    assert_same_grads(model, reference)


def test_a_freed_output_without_a_gradient_is_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)
    edge = get_gradient_edge(layer(x))
    for call in (
        lambda: split.stage_backward_input([edge], None, [x], layer.parameters()),
        lambda: split.stage_backward((edge,), None, [x]),
    ):
        with pytest.raises(SplitError, match=r"an output that was freed must have a gradient.*got none for an edge"):
            call()


def test_an_input_that_is_passed_twice_which_torch_adds_twice() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    reference, their_x = twin(layer, x)
    dinputs, _ = split.stage_backward_input([layer(x) + x], [torch.ones(3, 4)], [x, x], layer.parameters())
    (reference(their_x) + their_x).sum().backward()
    for grad in (*dinputs, x.grad):
        torch.testing.assert_close(grad, their_x.grad)


def test_groups_of_another_library_are_refused() -> None:
    with pytest.raises(SplitError, match=r"got a group with \['grads', 'params'\]. Fix: use both"):
        split.stage_backward_weight(iter(()), [{"params": set(), "grads": []}])


class TestInstall:
    def test_as_a_context(self) -> None:
        with split.install():
            assert stage.stage_backward_input is split.stage_backward_input
            with split.install():
                pass
            assert stage.stage_backward_weight is split.stage_backward_weight
        assert stage.stage_backward is theirs.stage_backward

    def test_as_calls(self) -> None:
        split.install()
        assert stage.stage_backward is split.stage_backward
        split.uninstall()
        assert stage.stage_backward is theirs.stage_backward
        split.uninstall()

    def test_after_an_error(self) -> None:
        with pytest.raises(ZeroDivisionError), split.install():
            raise ZeroDivisionError
        assert stage.stage_backward_input is theirs.stage_backward_input

    @pytest.mark.parametrize("name", parallel.STAGE_FUNCTIONS)
    def test_our_parameters_are_torchs(self, name: str) -> None:
        assert list(inspect.signature(getattr(split, name)).parameters) == parallel.STAGE_FUNCTIONS[name]

    def test_a_newer_torch_with_the_same_functions_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "3.0.0")
        require.cache_clear()
        with split.install():
            assert stage.stage_backward is split.stage_backward

    def test_changed_signatures_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(theirs, "stage_backward_weight", lambda weights, groups, extra: None)
        require.cache_clear()
        with pytest.raises(UnsupportedTorch, match=r"stage_backward_weight has the parameters weights, groups, extra"):
            split.install()
        assert stage.stage_backward is theirs.stage_backward
