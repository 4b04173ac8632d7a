"""What code on ``torch.autograd.graph`` may rely on without a word in its documentation: the drop-in does the same.

Every test runs on torch's module and on ours.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from saved_steps import moving
from torch import Tensor
from torch.autograd import graph as torchs

from sternway import saved
from sternway.dropin import autograd_graph as ours

both = pytest.mark.parametrize("graph", [torchs, ours], ids=["torch", "sternway"])


def _unchanged(x: Any) -> Any:
    return x


@both
def test_what_is_packed_comes_back_as_the_object_that_it_was(graph: ModuleType) -> None:
    made: list[Any] = []
    got: list[Any] = []

    def pack(x: Tensor) -> Any:
        value: Any = x.detach()
        value.note = f"number {len(made)}"
        made.append(value)
        return value

    def unpack(value: Any) -> Tensor:
        got.append(value)
        assert value.note.startswith("number")
        return value  # type: ignore[no-any-return]

    a = torch.rand(3, requires_grad=True)
    with graph.saved_tensors_hooks(pack, unpack):
        y = (a * a.exp()).sum()
    y.backward()
    assert len(got) == len(made) == 3
    assert {id(value) for value in got} == {id(value) for value in made}


@pytest.mark.filterwarnings("ignore:saved.offload moved nothing")
def test_also_where_the_pair_is_in_a_block_of_ours() -> None:
    """A policy around that does not move the tensor hands back the object too."""
    got: list[Any] = []

    def pack(x: Tensor) -> Any:
        value: Any = x.detach()
        value.note = "mine"
        return value

    a = torch.rand(3, requires_grad=True)
    with (
        saved.offload(min_bytes="1GiB"),
        ours.saved_tensors_hooks(pack, lambda value: got.append(value.note) or value),  # type: ignore[func-returns-value]
    ):
        y = a.exp().sum()
    y.backward()
    assert got == ["mine"]
    torch.testing.assert_close(a.grad, a.exp())


@both
def test_what_is_packed_may_be_a_buffer_that_changes_later(graph: ModuleType) -> None:
    buffer = torch.zeros(3)

    def pack(x: Tensor) -> Tensor:
        return buffer.copy_(x.detach())

    a = torch.rand(3, requires_grad=True)
    with graph.saved_tensors_hooks(pack, lambda value: value.clone()):
        y = a.exp().sum()
    buffer.fill_(7)  # nobody's business but the hooks'
    y.backward()
    assert torch.equal(a.grad, torch.full((3,), 7.0))  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("kind", ["saved_tensors_hooks", "save_on_cpu"])
def test_a_block_can_be_entered_and_left_by_hand(graph: ModuleType, kind: str) -> None:
    calls: list[str] = []

    def pack(x: Tensor) -> Tensor:
        calls.append("pack")
        return x.detach()

    pair = graph.save_on_cpu() if kind == "save_on_cpu" else graph.saved_tensors_hooks(pack, _unchanged)
    a = torch.rand(3, requires_grad=True)
    assert pair.__enter__() is None
    y = a.exp().sum()
    assert pair.__exit__() is None
    z = a.exp().sum()
    (y + z).backward()
    torch.testing.assert_close(a.grad, 2 * a.exp())
    assert calls == ([] if kind == "save_on_cpu" else ["pack"])


@both
def test_raw_saved_tensors_show_what_the_hooks_made(graph: ModuleType) -> None:
    def pack(x: Tensor) -> tuple[str, Tensor]:
        return "packed", x.detach()

    def unpack(value: tuple[str, Tensor]) -> Tensor:
        return value[1]

    a = torch.rand(3, requires_grad=True)
    with graph.saved_tensors_hooks(pack, unpack):
        node: Any = a.square().grad_fn
    raw = node._raw_saved_self
    assert raw.data[0] == "packed"
    assert raw.unpack_hook is unpack
    assert torch.equal(raw.data[1], a)
    assert torch.equal(node._saved_self, a)


@both
def test_hooks_can_be_put_on_one_saved_tensor(graph: ModuleType) -> None:
    """``register_hooks`` is for a saved tensor that has none; in a block it has some."""
    a = torch.rand(3, requires_grad=True)
    node: Any = a.square().grad_fn
    node._raw_saved_self.register_hooks(lambda x: x.detach() * 2, _unchanged)
    assert torch.equal(node._saved_self, 2 * a)
    with graph.saved_tensors_hooks(lambda x: x.detach(), _unchanged):
        node = a.square().grad_fn
    with pytest.raises(RuntimeError, match="have already been set"):
        node._raw_saved_self.register_hooks(_unchanged, _unchanged)


@both
@pytest.mark.parametrize("kind", ["saved_tensors_hooks", "save_on_cpu"])
def test_a_block_that_is_not_left_inside_a_backward_ends_with_it(graph: ModuleType, kind: str) -> None:
    calls: list[str] = []

    def pack(x: Tensor) -> Tensor:
        calls.append("pack")
        return x.detach()

    pair = graph.save_on_cpu() if kind == "save_on_cpu" else graph.saved_tensors_hooks(pack, _unchanged)

    class Enters(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            pair.__enter__()
            return grad

    a = torch.rand(3, requires_grad=True)
    Enters.apply(a).sum().backward()
    a.grad = None
    y = a.exp().sum()
    with graph.saved_tensors_hooks(lambda x: x.detach() * 3, _unchanged):
        z = a.exp().sum()
    with moving() as report:
        w = (2 * a).exp().sum()
    (y + z + w).backward()
    assert calls == []
    assert report.moved_bytes == a.nbytes  # one that follows works as ever
    torch.testing.assert_close(a.grad, 4 * a.exp() + 2 * (2 * a).exp())


@both
def test_the_pairs_are_of_one_family(graph: ModuleType) -> None:
    assert issubclass(graph.save_on_cpu, graph.saved_tensors_hooks)
    assert issubclass(graph.save_on_cpu, torchs.saved_tensors_hooks)
    context = graph.save_on_cpu()
    tensor = torch.rand(3)
    assert torch.equal(context.unpack_hook(context.pack_hook(tensor)), tensor)


@both
def test_attributes_may_be_set_after_the_pair_was_made(graph: ModuleType) -> None:
    pair = graph.saved_tensors_hooks(_unchanged, _unchanged)
    pair.pack_hook = lambda x: x.detach() * 5
    a = torch.rand(3, requires_grad=True)
    with pair:
        y = a.exp().sum()
    y.backward()
    torch.testing.assert_close(a.grad, 5 * a.exp())


@both
def test_in_compiled_code(graph: ModuleType) -> None:
    """The block breaks the graph, in both; what is saved in it goes through the hooks all the same."""
    calls: list[str] = []

    def pack(x: Tensor) -> Tensor:
        calls.append("pack")
        return x.detach() * 10

    def hooks(x: Tensor) -> Tensor:
        with graph.saved_tensors_hooks(pack, lambda value: value / 10):
            return x.exp()

    def on_cpu(x: Tensor) -> Tensor:
        with graph.save_on_cpu():
            return (2 * x).exp()

    def disabled(x: Tensor) -> Tensor:
        with graph.disable_saved_tensors_hooks("not here"):
            return x.exp()

    for function in (hooks, on_cpu, disabled):
        torch.compiler.reset()
        a = torch.rand(3, requires_grad=True)
        expected = torch.autograd.grad(function(a).sum(), a)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo says that it breaks the graph
            y = torch.compile(function, backend="aot_eager", fullgraph=function is disabled)(a)
        y.sum().backward()
        torch.testing.assert_close(a.grad, *expected)
    assert calls == ["pack", "pack"]


@both
def test_around_compiled_code(graph: ModuleType) -> None:
    calls: list[str] = []

    def pack(x: Tensor) -> Tensor:
        calls.append("pack")
        return x.detach() * 10

    torch.compiler.reset()
    a = torch.rand(3, requires_grad=True)
    with graph.saved_tensors_hooks(pack, lambda value: value / 10):
        y = torch.compile(lambda x: (2 * x).exp(), backend="aot_eager", fullgraph=True)(a)
    y.sum().backward()
    torch.testing.assert_close(a.grad, 2 * (2 * a).exp())
    assert calls == ["pack"]
