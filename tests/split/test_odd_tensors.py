"""Tensors that are not ordinary: other layouts, no elements, no memory, subclasses. Split equals a plain backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from sternway import split
from sternway._tree import replace_leaves

Built = tuple[Tensor, list[Tensor], list[Tensor]]  # the loss, the stage's inputs, the parameters


class Named(Tensor):
    pass


class Doubling(Tensor):
    """A product means something else with it. Autograd asks no subclass in a backward."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.mul_(2) if getattr(func, "__name__", "") in ("matmul", "__matmul__") else found


class Refusing(nn.Parameter):
    """A parameter that may not be looked at, as torch's expanded weights are."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            raise RuntimeError("not to be read")
        return super().__torch_function__(func, types, args, kwargs or {})


def _onednn(needs: bool) -> Built:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=needs)
    return F.conv2d(x.to_mkldnn(), layer.weight, layer.bias).to_dense().sum(), [x], list(layer.parameters())


def _empty_linear(needs: bool) -> Built:
    layer, x = nn.Linear(0, 12), torch.randn(3, 0, requires_grad=needs)
    return layer(x).sum(), [x], list(layer.parameters())


def _empty_batch(needs: bool) -> Built:
    layer, x = nn.Linear(4, 12), torch.randn(0, 4, requires_grad=needs)
    return layer(x).sum(), [x], list(layer.parameters())


def _empty_convolution(needs: bool) -> Built:
    layer, x = nn.Conv1d(0, 3, 1), torch.randn(2, 0, 5, requires_grad=needs)
    return layer(x).sum(), [x], list(layer.parameters())


def _zeros_without_memory(needs: bool) -> Built:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=needs)
    other = torch.randn(4, requires_grad=True)
    return torch.sgn(x @ weight).sum() + torch.sgn(other).sum(), [x], [weight, other]


def _sparse(layout: str, hooked: bool) -> Callable[[bool], Built]:
    def build(needs: bool) -> Built:
        weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4).relu()
        sparse = (x.to_sparse() if layout == "coo" else x.to_sparse_csr()).requires_grad_(needs)
        if hooked:
            weight.register_hook(lambda grad: 2 * grad)
        return torch.sparse.mm(sparse, weight).sum(), [sparse], [weight]

    return build


def _sparse_values(needs: bool) -> Built:
    values, weight = torch.randn(3, requires_grad=True), torch.randn(5, 2, requires_grad=True)
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [0, 1, 4]]), 2 * values, (3, 5), check_invariants=True)
    return torch.sparse.mm(matrix, weight).sum(), [], [values, weight]


def _subclass(needs: bool) -> Built:
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4).as_subclass(Named).requires_grad_(needs)
    return (x @ weight).sum(), [x], [weight]


def _doubling(needs: bool) -> Built:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=needs)
    return layer(x.as_subclass(Doubling)).as_subclass(Tensor).square().sum(), [x], list(layer.parameters())


def _refusing(needs: bool) -> Built:
    weight = Tensor._make_subclass(Refusing, torch.randn(4, 4), True)
    x = torch.randn(3, 4, requires_grad=needs)
    return (x @ weight).sum(), [x], [weight]


def _nested(needs: bool) -> Built:
    layer, x = nn.Linear(4, 4), torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return torch.nested.to_padded_tensor(layer(x), 0.0).sum(), [], list(layer.parameters())


BUILDS: dict[str, Callable[[bool], Built]] = {
    "oneDNN": _onednn,
    "empty linear": _empty_linear,
    "empty batch": _empty_batch,
    "empty convolution": _empty_convolution,
    "zeros without memory": _zeros_without_memory,
    "coo": _sparse("coo", False),
    "csr": _sparse("csr", False),
    "coo, hooked": _sparse("coo", True),
    "csr, hooked": _sparse("csr", True),
    "values of a sparse tensor": _sparse_values,
    "subclass": _subclass,
    "doubling subclass": _doubling,
    "refusing subclass": _refusing,
    "nested": _nested,
}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that sparse CSR, nested and empty tensors are unusual
        yield


def _dense(value: Tensor | None) -> Tensor | None:
    return value if value is None or value.layout is torch.strided else value.to_dense()


@pytest.mark.parametrize("needs", [False, True], ids=["stage 0", "middle"])
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_equals_a_plain_backward(build: Callable[[bool], Built], needs: bool) -> None:
    with quiet():
        torch.manual_seed(0)
        loss, their_inputs, theirs = build(needs)
        loss.backward()
        torch.manual_seed(0)
        loss, inputs, ours = build(needs)
        grads, pending = split.backward_input(loss, None, inputs)
        pending.run()
        with torch._C.DisableTorchFunctionSubclass():
            expected = [each.grad for each in (*their_inputs, *theirs)]
            found = [*grads, *(each.grad for each in ours)]
        assert [*map(type, found[-len(ours) :])] == [*map(type, expected[-len(ours) :])]
        for mine, their in zip(found, expected, strict=True):
            assert (mine is None) == (their is None)
            if mine is not None:
                assert mine.layout == their.layout
                torch.testing.assert_close(_dense(mine), _dense(their))


def test_per_sample_gradients() -> None:
    layer, x, found = nn.Linear(4, 3), torch.randn(5, 4), []
    for backward in (Tensor.backward, lambda loss: split.backward_input(loss)[1].run()):
        backward(call_for_per_sample_grads(layer, loss_reduction="sum")(x).square().sum())
        found.append([parameter.grad_sample for parameter in layer.parameters()])
        for parameter in layer.parameters():
            del parameter.grad_sample
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not hasattr(torch.autograd, "enforce_grad_layout_policy"), reason="a policy of torch 2.13")
@pytest.mark.parametrize("enforced", [False, True])
def test_the_layout_of_a_first_gradient(enforced: bool) -> None:
    found = []
    for backward in (Tensor.backward, lambda loss: split.backward_input(loss)[1].run()):
        weight = torch.randn(4, 3).t().requires_grad_()
        with torch.autograd.enforce_grad_layout_policy(enforced):
            backward((torch.ones(2, 3) @ weight).sum())
        found.append(weight.grad.stride())
    assert found[0] == found[1]


class Standing(Tensor):
    """A tensor that stands for another one, and passes that on to whatever function it is given to."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Standing:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        args = replace_leaves(lambda arg: arg.inner if isinstance(arg, cls) else arg, args)
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on the stand-in itself")


def test_an_output_that_stands_for_another_tensor() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    torch.autograd.backward(Standing(layer(x)), torch.ones(5, 3))
    expected = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    grad, pending = split.backward_input(Standing(layer(x)), torch.ones(5, 3), x)
    pending.run()
    torch.testing.assert_close([grad, layer.weight.grad, layer.bias.grad], expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_outputs() -> None:
    layer, found = nn.Linear(4, 3), []
    rows = [torch.randn(2, 4), torch.randn(5, 4)]
    grads = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)])
    for backward in (torch.autograd.backward, lambda y, grad: split.backward_input(y, grad)[1].run()):
        backward(layer(torch.nested.as_nested_tensor(rows)), grads)
        found.append((layer.weight.grad, layer.bias.grad))
        layer.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_input_that_is_a_leaf() -> None:
    layer, rows = nn.Linear(4, 3), [torch.randn(2, 4), torch.randn(5, 4)]
    grads = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)])
    x = torch.nested.nested_tensor(rows, requires_grad=True)
    expected = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], grads)
    grad, pending = split.backward_input(layer(x), grads, x)
    pending.run()
    torch.testing.assert_close(
        [*grad.unbind(), layer.weight.grad, layer.bias.grad], [*expected[0].unbind(), *expected[1:]]
    )


def test_an_edge_of_one_element_needs_no_gradient() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    edge = torch.autograd.graph.get_gradient_edge(layer(x).sum())
    grad, _ = split.backward_input(edge, None, x)
    torch.testing.assert_close(grad, expected)
