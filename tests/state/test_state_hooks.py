"""What a hook may do, in each way a function can run; and that compiling is done once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sternway._torch.tracing import forbid_cuda_graphs
from sternway.errors import StateError, UnsupportedTorch
from sternway.state import BackwardState
from ways import COMPILED, EVERY, WAYS, no_recompile, run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own


def leaf(rows: int = 4) -> Tensor:
    return torch.randn(rows, 4, requires_grad=True)


class Model(torch.nn.Module):
    """Several places, one of them used twice, with buffers that compilers like to use again."""

    def __init__(self, state: BackwardState | None, *fns: Any) -> None:
        super().__init__()
        self.state, self.fns = state, fns
        self.first, self.second = (torch.nn.Linear(32, 32, bias=False) for _ in range(2))

    def show(self, y: Tensor) -> Tensor:
        return y if self.state is None else self.state.on_grad(y, *self.fns)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(3):
            h = self.show(self.show(self.first(h)) @ self.second.weight).cumsum(0).sin()
        return h


def grads(model: torch.nn.Module, way: str, x: Tensor, weight: Tensor) -> list[Tensor]:
    (run(model, way)(x) * weight).sum().backward()
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("way", EVERY)
def test_a_hook_keeps_what_it_sees_whatever_the_compiler_does_with_its_buffers(way: str) -> None:
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(grad: Tensor) -> None:
        kept.append(grad if len(kept) % 2 else grad.view(-1)[3:])
        copies.append(kept[-1].clone())

    x, weight = torch.randn(32, 32), torch.randn(32, 32)
    model, plain = Model(BackwardState(), keep), Model(None)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(grads(model, way, x, weight), grads(plain, "plain", x, weight), atol=1e-4, rtol=1e-4)
    assert len(kept) == 6
    for tensor, copy in zip(kept, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("way", EVERY)
def test_a_hook_that_replaces_is_eager_code_with_a_tensor_hook(way: str) -> None:
    def halve(grad: Tensor) -> Tensor:
        return (0.5 * grad).t().contiguous().t()  # in another layout, too

    class Hooked(Model):
        def show(self, y: Tensor) -> Tensor:
            y.register_hook(halve)
            return y

    x, weight = torch.randn(32, 32), torch.randn(32, 32)
    model, plain = Model(BackwardState(), halve), Hooked(None)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(grads(model, way, x, weight), grads(plain, "plain", x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_several_hooks_on_one_tensor_run_in_order(way: str) -> None:
    state, order = BackwardState(), []

    def times(factor: float, name: str, grad: Tensor) -> Tensor:
        order.append((name, grad[0, 0].item()))
        return factor * grad

    def forward(x: Tensor) -> Tensor:
        y = state.on_grad(2 * x, partial(times, 10, "a"), partial(times, 10, "b"))
        y = state.on_grad(y, partial(times, 10, "c"))
        z = state.on_grad(3 * y, partial(times, 1, "z"))
        y = state.on_grad(y, partial(times, 10, "d"))  # y, though another tensor was hooked in between
        return (y + z).sum()

    x = leaf()
    run(forward, way)(x).backward()
    assert order == [("z", 1.0), ("a", 4.0), ("b", 40.0), ("c", 400.0), ("d", 4000.0)]
    torch.testing.assert_close(x.grad, torch.full_like(x, 80000.0))


@pytest.mark.parametrize("way", WAYS)
def test_retain_graph_and_a_second_backward(way: str) -> None:
    state, seen, x = BackwardState(), [], leaf()
    loss = run(lambda x: state.on_grad(x.sin(), lambda grad: seen.append(state.word)).sum(), way)(x)
    state.word = "first"
    loss.backward(retain_graph=True)
    state.word = "second"
    loss.backward()
    assert seen == ["first", "second"]
    torch.testing.assert_close(x.grad, 2 * x.cos())


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_removed_before_the_backward_is_not_called(way: str) -> None:
    state, seen, x = BackwardState(), [], leaf()

    def one(grad: Tensor) -> None:
        seen.append("one")

    def other(grad: Tensor) -> None:
        seen.append("other")

    compiled = run(lambda x, state: state.on_grad(x.sin(), one, other, one).sum(), way)
    loss = compiled(x, state)
    state.remove(one)
    loss.backward(retain_graph=True)
    assert seen == ["other"]
    with pytest.raises(StateError, match="must be a function that was passed to on_grad"):
        state.remove(one)
    state.remove()
    loss.backward()
    assert seen == ["other"]
    compiled(x, state).backward()  # the next forward makes them anew
    assert seen == ["other", "one", "other", "one"]


@pytest.mark.parametrize("way", WAYS)
def test_what_a_hook_raises_comes_out(way: str) -> None:
    state, x = BackwardState(), leaf()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("in the hook")

    def fine(grad: Tensor) -> None:
        seen.append(state.word)

    seen: list[str] = []
    compiled = run(lambda x, fn: state.on_grad(x.sin(), fn).sum(), way)
    loss = compiled(x, fail)
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        loss.backward()
    loss = compiled(x, fine)
    state.word = "works again"
    loss.backward()
    assert seen == ["works again"]


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_may_run_a_backward_of_its_own(way: str) -> None:
    state, probe = BackwardState(), torch.zeros(4, requires_grad=True)

    def train(grad: Tensor) -> None:
        with torch.enable_grad():
            (grad.detach().sum(0) * probe).sum().backward()

    run(lambda x: state.on_grad(x.sin(), train).sum(), way)(leaf()).backward()
    torch.testing.assert_close(probe.grad, torch.full((4,), 4.0))


@pytest.mark.parametrize("way", COMPILED)
def test_a_hook_that_writes_into_the_gradient_writes_into_its_own(way: str) -> None:
    state, x = BackwardState(), leaf()

    def wipe(grad: Tensor) -> None:
        grad.zero_()

    run(lambda x: state.on_grad(x.sin(), wipe).sum(), way)(x).backward()
    torch.testing.assert_close(x.grad, x.cos())


@pytest.mark.parametrize("way", WAYS)
def test_what_a_hook_changes_costs_no_recompile(way: str) -> None:
    """Hooks that are made in compiled code, and change lists that they close over, at every step."""
    state, seen, by_step = BackwardState(), [], {}

    def note(word: str, grad: Tensor) -> None:
        by_step[len(by_step)] = word

    def forward(x: Tensor) -> Tensor:
        def inner(grad: Tensor) -> None:
            seen.append(grad.shape)

        y = state.on_grad(x.sin(), lambda grad: seen.append(grad), lambda grad: inner(grad))
        return state.on_grad(y.exp(), partial(note, "partial")).sum()

    compiled, x = run(forward, way), leaf()
    with no_recompile():
        for _ in range(3):
            compiled(x).backward()
    assert len(seen) == 6
    assert by_step == dict.fromkeys(range(3), "partial")


@pytest.mark.parametrize("way", COMPILED)
def test_dynamic_shapes_compile_once(way: str) -> None:
    seen: list[int] = []
    compiled = run(lambda x, state, fn: state.on_grad(state.on_grad(x.sin(), fn).exp(), fn).sum(), way, dynamic=True)
    with no_recompile():
        for rows in (3, 5, 8):
            compiled(leaf(rows), BackwardState(), lambda grad: seen.append(len(grad))).backward()
    assert seen == [3, 3, 5, 5, 8, 8]


@pytest.mark.parametrize("way", COMPILED)
def test_new_shapes_while_another_call_is_in_flight(way: str) -> None:
    """The graph of the new shape is of the same code: not a second graph to the state."""
    state, seen = BackwardState(), []
    compiled = run(lambda x: state.on_grad(x.sin(), lambda grad: seen.append(len(grad))).sum(), way, dynamic=False)
    losses = [compiled(leaf(rows)) for rows in (2, 3, 4)]
    for loss in losses:
        loss.backward()
    assert seen == [2, 3, 4]


@pytest.mark.parametrize("way", WAYS)
def test_where_gradients_are_disabled_it_does_nothing(way: str) -> None:
    state = BackwardState()
    compiled = run(lambda x: state.on_grad(x.sin(), print).sum(), way)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin().sum())


@pytest.mark.parametrize("way", WAYS)
def test_no_functions_at_all(way: str) -> None:
    state, x = BackwardState(), leaf()
    run(lambda x: state.on_grad(x.sin()).sum(), way)(x).backward()
    torch.testing.assert_close(x.grad, x.cos())


@pytest.mark.parametrize("way", WAYS)
def test_the_tensor_may_be_changed_in_place_afterwards(way: str) -> None:
    state, seen, x = BackwardState(), [], leaf()

    def forward(x: Tensor) -> Tensor:
        return state.on_grad(2 * x, lambda grad: seen.append(grad)).relu_().sum()

    run(forward, way)(x).backward()
    torch.testing.assert_close(x.grad, 2.0 * (x > 0))
    torch.testing.assert_close(seen, [1.0 * (x > 0)])


@pytest.mark.parametrize("way", WAYS)
def test_an_input_a_view_and_a_parameter_may_be_hooked(way: str) -> None:
    seen: list[Any] = []
    weight, x = torch.nn.Parameter(torch.ones(4, 4)), leaf()
    state = BackwardState()

    def note(grad: Tensor) -> None:
        seen.append(tuple(grad.shape))

    def forward(x: Tensor) -> Tensor:
        y = state.on_grad(x, note) @ state.on_grad(weight, note)
        return state.on_grad(y.t()[1:], note).sum()

    run(forward, way)(x).backward()
    assert sorted(seen) == [(3, 4), (4, 4), (4, 4)]
    assert weight.grad is not None


@pytest.mark.parametrize("missing", ["root_tx", "current_tx"])
def test_a_dynamo_that_is_built_differently_is_an_error(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Dynamo's records checks would be left out, or every step compiled again, and nobody told."""
    from sternway.state import _tracing

    real = _tracing.graph_being_traced

    def without() -> object:
        graph = real()
        names = {"root_tx", "current_tx", "side_effects"} - {missing}
        return graph and SimpleNamespace(**{name: getattr(graph, name) for name in names})

    monkeypatch.setattr(_tracing, "graph_being_traced", without)
    state = BackwardState()
    with pytest.raises(Exception, match=r"must do what compiled code with a BackwardState needs"):
        run(lambda x: state.on_grad(x.sin(), print).sum(), "aot_eager")(leaf())


def test_an_inductor_that_cannot_be_told_of_cuda_graphs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph would be replayed without the hooks."""
    from torch._inductor import virtualized

    monkeypatch.setattr(virtualized, "V", SimpleNamespace(graph=SimpleNamespace(no_cudagraphs_because="renamed")))
    with pytest.raises(UnsupportedTorch, match=r"disable_cudagraphs_reason must do .* AttributeError"):
        forbid_cuda_graphs("hooks")


def test_eager_code_can_be_differentiated_twice_through_a_hook() -> None:
    x = leaf()
    y = BackwardState().on_grad(x**3, lambda grad: 2 * grad)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 12 * x)


def test_under_a_checkpoint_each_call_keeps_its_own_values() -> None:
    """The second forward, in the backward, must not make the state forget which call is going back."""
    state, seen, x = BackwardState(), [], leaf()

    def block(x: Tensor) -> Tensor:
        return state.on_grad(x.sin(), lambda grad: seen.append(state.number)).exp()

    losses = []
    for number in range(2):
        losses.append(checkpoint(block, x, use_reentrant=False).sum())
        state.number = number
    for loss in losses:
        loss.backward()
    assert seen == [0, 1]


def test_compiled_autograd_may_be_on() -> None:
    from torch._dynamo import compiled_autograd

    seen: list[int] = []
    compiled = run(lambda x, state, fn: state.on_grad(x.sin(), fn).sum(), "aot_eager")
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for number in range(2):
            compiled(leaf(), BackwardState(), lambda grad, number=number: seen.append(number)).backward()
    assert seen == [0, 1]
