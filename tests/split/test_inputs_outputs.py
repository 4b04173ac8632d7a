"""What may go in and come out: many tensors, nested containers, views, None, nothing at all."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from compare import assert_same_grads, twin
from sternway import split
from sternway._tree import leaves
from sternway.errors import SplitError


@dataclass
class Batch:
    x: Any
    mask: Any = None


class Pair(NamedTuple):
    left: Any
    right: Any


def both(
    model: nn.Module, outputs: Any, x: Tensor, grads: list[Tensor | None], inputs: Any
) -> tuple[Any, nn.Module, Tensor]:
    """Split on ``model``; a plain backward on a twin. The input gradients, the twin and the twin's input."""
    reference, their_x = twin(model, x)
    found, pending = split.backward_input(outputs(model, x), grads, inputs(x))
    pending.run()
    theirs = [t for t in leaves(outputs(reference, their_x)) if isinstance(t, Tensor) and t.requires_grad]
    flat = list(leaves(grads))
    kept = [(t, g) for t, g in zip(theirs, flat, strict=True) if g is not None or t.numel() == 1]
    torch.autograd.backward([t for t, _ in kept], [g for _, g in kept])
    return found, reference, their_x


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 4, requires_grad=True)


SHAPES = {
    "tensor": (lambda a, b: (a, b), lambda g, h: (g, h)),
    "list": (lambda a, b: [a, b], lambda g, h: [g, h]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda g, h: {"a": g, "b": h}),
    "nested": (lambda a, b: {"a": [a, {"b": (b,)}]}, lambda g, h: {"a": [g, {"b": (h,)}]}),
    "dataclass": (lambda a, b: Batch(a, b), lambda g, h: Batch(g, h)),
    "named tuple": (lambda a, b: Pair(a, b), lambda g, h: Pair(g, h)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_nested_outputs(model: nn.Module, x: Tensor, shape: str) -> None:
    pack, pack_grads = SHAPES[shape]
    g, h = torch.randn(5, 4), torch.randn(5, 6)

    def outputs(model: nn.Module, x: Tensor) -> Any:
        return pack(model(x), model[0](x).relu())

    found, reference, their_x = both(model, outputs, x, pack_grads(g, h), lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_gradients_for_a_dict_are_matched_by_key(model: nn.Module, x: Tensor) -> None:
    g, h = torch.randn(5, 4), torch.randn(5, 4)
    reference, their_x = twin(model, x)
    found, pending = split.backward_input({"a": model(x), "b": x.sin()}, {"b": h, "a": g}, x)
    pending.run()
    torch.autograd.backward([reference(their_x), their_x.sin()], [g, h])
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_nested_inputs_come_back_nested_alike(model: nn.Module) -> None:
    used, unused = torch.randn(5, 4, requires_grad=True), torch.randn(2, requires_grad=True)
    plain, other = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    inputs = {"a": [used, 3, "text", None], "b": Batch(Pair(other, plain), unused), "c": OrderedDict(z=used)}
    grads, pending = split.backward_input(model(used + plain + other).sum(), None, inputs)
    pending.run()
    assert type(grads["b"]) is Batch
    assert type(grads["b"].x) is Pair
    torch.testing.assert_close(grads["a"][0], grads["c"]["z"])
    torch.testing.assert_close(grads["a"][0], grads["b"].x.left)
    assert grads["a"][1:] == [None, None, None]
    assert grads["b"].x.right is None
    assert grads["b"].mask is None


def test_none_for_an_output_means_no_gradient(model: nn.Module, x: Tensor) -> None:
    g = torch.randn(5, 4)
    found, reference, their_x = both(model, lambda m, x: (m(x), m[0](x)), x, (g, None), lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_none_for_every_output_computes_nothing(model: nn.Module, x: Tensor) -> None:
    found, pending = split.backward_input((model(x),), (None,), x)
    pending.run()
    assert found is None
    assert all(p.grad is None for p in model.parameters())


def test_a_scalar_needs_no_gradient(model: nn.Module, x: Tensor) -> None:
    found, reference, their_x = both(model, lambda m, x: m(x).square().mean(), x, None, lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_outputs_that_are_views(model: nn.Module, x: Tensor) -> None:
    def outputs(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        return y[:, :2], y.t(), y.view(-1), *y.unbind(0)

    grads = (torch.randn(5, 2), torch.randn(4, 5), torch.randn(20), *torch.randn(5, 4))
    found, reference, their_x = both(model, outputs, x, grads, lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_an_output_that_is_an_input(model: nn.Module, x: Tensor) -> None:
    g, h = torch.randn(5, 4), torch.randn(5, 4)
    found, reference, their_x = both(model, lambda m, x: (x, m(x)), x, (g, h), lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_only_an_input_as_output(x: Tensor) -> None:
    g = torch.randn(5, 4)
    found, pending = split.backward_input(x, g, x)
    torch.testing.assert_close(found, g)
    assert pending.deferred == pending.ready == ()
    pending.run()


def test_an_output_that_is_a_parameter() -> None:
    weight = nn.Parameter(torch.randn(3))
    _, pending = split.backward_input(weight, torch.ones(3))
    assert weight.grad is None
    pending.run()
    torch.testing.assert_close(weight.grad, torch.ones(3))


def test_an_output_twice(model: nn.Module, x: Tensor) -> None:
    reference, their_x = twin(model, x)
    y, z = model(x), reference(their_x)
    g, h = torch.randn(5, 4), torch.randn(5, 4)
    found, pending = split.backward_input([y, y], [g, h], x)
    pending.run()
    z.backward(g + h)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_inputs_inside_the_graph_are_where_gradient_stops(model: nn.Module, x: Tensor) -> None:
    below = nn.Linear(4, 4)
    h = below(x)
    found, pending = split.backward_input(model(h).sum(), None, h)
    pending.run()
    reference, their_h = twin(model, h)
    reference(their_h).sum().backward()
    torch.testing.assert_close(found, their_h.grad)
    assert_same_grads(model, reference)
    assert below.weight.grad is None
    h.backward(found)  # the graph below is whole
    assert below.weight.grad is not None


def test_one_of_several_outputs_of_a_node_as_input() -> None:
    weight = nn.Parameter(torch.randn(3, 4))
    first, second, _ = weight.unbind(0)
    (found,), pending = split.backward_input((first * second).sum(), None, (first,))
    torch.testing.assert_close(found, second.detach())
    pending.run()
    torch.testing.assert_close(weight.grad[1], first.detach())
    assert not weight.grad[0].any()


def test_a_parameter_as_input_is_returned_and_not_accumulated(model: nn.Module, x: Tensor) -> None:
    reference, their_x = twin(model, x)
    weight = model[2].weight
    (grad,), pending = split.backward_input(model(x).sum(), None, (weight,))
    pending.run()
    reference(their_x).sum().backward()
    torch.testing.assert_close(grad, reference[2].weight.grad)
    assert weight.grad is None
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)


def test_gradient_edges_for_outputs_and_inputs(model: nn.Module, x: Tensor) -> None:
    reference, their_x = twin(model, x)
    g = torch.randn(5, 4)
    y, z = model(x), reference(their_x)
    (found,), pending = split.backward_input([get_gradient_edge(y)], [g], [get_gradient_edge(x)])
    pending.run()
    z.backward(g)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)


def test_frozen_and_unused_parameters(model: nn.Module, x: Tensor) -> None:
    model.unused = nn.Linear(3, 3)
    model[0].weight.requires_grad_(False)
    forward = lambda m, x: m[2](m[1](m[0](x)))  # noqa: E731
    found, reference, their_x = both(model, forward, x, torch.ones(5, 4), lambda x: x)
    torch.testing.assert_close(found, their_x.grad)
    assert_same_grads(model, reference)
    assert model.unused.weight.grad is None
    assert model[0].weight.grad is None


def test_first_stage_runs_the_spine_in_i_and_the_products_in_w() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    ran: list[str] = []
    y = torch.randn(5, 4)
    for index, layer in enumerate(model):
        y = layer(y)
        y.register_hook(lambda grad, index=index: ran.append(f"layer {index}"))
    _, pending = split.backward_input(y.sum())
    assert ran == [f"layer {index}" for index in (4, 3, 2, 1, 0)]  # down to the lowest layer, in I
    assert len(pending.deferred) == 6
    pending.run()
    assert len(ran) == 5


@pytest.mark.parametrize(
    ("outputs", "grads", "message"),
    [
        (
            lambda y: (y, y),
            lambda y: (y,),
            r"must be nested as outputs are; got a tuple of 1 for outputs, which is a tuple of 2",
        ),
        (
            lambda y: {"a": [y]},
            lambda y: {"a": y},
            r"got a tensor of shape .* for outputs\['a'\], which is a list of 1",
        ),
        (lambda y: [y], lambda y: [y[:1]], r"got a tensor of shape \(1, 4\) for outputs\[0\], which is .*\(5, 4\)"),
        (lambda y: y, lambda y: 3, r"got a int for outputs, which is a tensor"),
        (
            lambda y: y,
            lambda y: None,
            r"cannot be left out unless every output is a scalar; got outputs, which is .* of shape \(5, 4\)",
        ),
        (lambda y: y.detach(), lambda y: None, r"at least one output must need a gradient; got 1 outputs"),
        (
            lambda y: get_gradient_edge(y),
            lambda y: None,
            r"cannot be left out unless every output is a scalar; got outputs, which is .* of shape \(5, 4\)",
        ),
    ],
)
def test_bad_input(model: nn.Module, x: Tensor, outputs: Any, grads: Any, message: str) -> None:
    y = model(x)
    with pytest.raises(SplitError, match=message):
        split.backward_input(outputs(y), grads(y), x)
    y.sum().backward()  # nothing was spoiled
    assert model[0].weight.grad is not None


def test_an_input_that_needs_no_gradient(model: nn.Module, x: Tensor) -> None:
    """Asked for alone it is a mistake; among others there is none for it."""
    batch = torch.randn(5, 4)
    with pytest.raises(
        SplitError, match=r"must require one; got a tensor of shape \(5, 4\) that does not.*leave inputs"
    ):
        split.backward_input(model(batch).sum(), None, batch)
    assert split.backward_input(model(batch).sum(), None, [batch])[0] == [None]
    none, grad = split.backward_input(model(x * batch).sum(), None, (batch, x))[0]
    assert none is None
    assert grad is not None


@pytest.mark.parametrize("first", ["plain", "split"])
def test_a_graph_whose_backward_has_run(model: nn.Module, x: Tensor, first: str) -> None:
    """torch would say to pass retain_graph=True, which a split does not take."""
    y = model(x).square().sum()
    if first == "plain":
        y.backward()
    else:
        split.backward_input(y, None, x)
    with pytest.raises(SplitError, match=r"a second time.*Fix: run the forward again") as caught:
        split.backward_input(y, None, x)
    assert "retain_graph" not in str(caught.value)
