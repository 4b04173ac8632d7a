"""The six clauses of the contract, in each way a function can run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sternway.errors import EmptyStateError, StateError
from sternway.state import BackwardState
from ways import COMPILED, EVERY, WAYS, no_recompile, run

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # Inductor's own


def leaf(rows: int = 4) -> Tensor:
    return torch.randn(rows, 4, requires_grad=True)


def scaled(x: Tensor, state: BackwardState) -> Tensor:
    return state.on_grad(x.sin(), lambda grad: grad * state.scale).exp().sum()


@pytest.mark.parametrize("way", EVERY)
def test_1_it_is_an_input_one_graph_serves_all_states_and_hooks(way: str) -> None:
    called = []

    def forward(x: Tensor, state: BackwardState, fn: Any) -> Tensor:
        return state.on_grad(x.sin(), fn).exp().sum()

    class Hook:
        def method(self, grad: Tensor) -> None:
            called.append("method")

        def __call__(self, grad: Tensor) -> None:
            called.append("object")

    note = called.append
    compiled, x = run(forward, way), leaf()
    with no_recompile():
        for fn in (lambda grad: called.append("lambda"), Hook(), Hook().method, lambda grad: note("closure")):
            compiled(x, BackwardState(), fn).backward()
    assert called == ["lambda", "object", "method", "closure"]


@pytest.mark.parametrize("way", WAYS)
def test_1_a_state_that_is_closed_over_may_be_another_one_at_the_next_call(way: str) -> None:
    holder, seen = nn.Module(), []
    holder.state = BackwardState()

    def forward(x: Tensor) -> Tensor:
        return holder.state.on_grad(x.sin(), lambda grad: seen.append(holder.state.step)).sum()

    compiled, x = run(forward, way), leaf()
    with no_recompile():
        for step in range(3):
            loss = compiled(x)
            holder.state.step = step
            loss.backward()
            holder.state = BackwardState()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("way", WAYS)
def test_2_it_is_used_only_in_the_backward(way: str) -> None:
    """Forward and gradients are those of the function without it."""
    x = leaf()
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    loss = run(lambda x, state: state.on_grad(x.sin(), lambda grad: None).exp().sum(), way)(x, BackwardState())
    torch.testing.assert_close(loss, x.sin().exp().sum())
    loss.backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("way", WAYS)
def test_3_it_is_empty_in_the_forward_and_filled_after_it(way: str) -> None:
    state, x = BackwardState(), leaf()
    compiled = run(scaled, way)
    for scale in (2.0, 3.0):
        loss = compiled(x, state)
        with pytest.raises(EmptyStateError, match="cannot be read before the backward"):
            _ = state.scale
        state.scale = scale
        x.grad = None
        loss.backward()
        torch.testing.assert_close(x.grad, scale * x.sin().exp() * x.cos())
        assert state.scale == scale  # and after the backward

    compiled(x, state)
    assert not hasattr(state, "scale"), "a new forward starts empty"


@pytest.mark.parametrize("way", WAYS)
def test_3_values_of_any_kind(way: str) -> None:
    state, x, seen = BackwardState(), leaf(), []

    def forward(x: Tensor) -> Tensor:
        return state.on_grad(2 * x, lambda grad: seen.append((state.words, state.call(1), state.tensor))).sum()

    loss = run(forward, way)(x)
    state.words, state.call, state.tensor = {"a": [1]}, lambda one: one + 1, torch.ones(2)
    loss.backward()
    ((words, two, tensor),) = seen
    assert words == {"a": [1]}
    assert two == 2
    assert tensor is state.tensor


@pytest.mark.parametrize("way", WAYS)
def test_3_a_hook_may_set_values_too(way: str) -> None:
    state, x = BackwardState(), leaf()

    def keep(grad: Tensor) -> None:
        state.norm = grad.norm().item()

    run(lambda x: state.on_grad(2 * x, keep).sum(), way)(x).backward()
    assert state.norm == 4.0
    del state.norm
    assert not hasattr(state, "norm")


@pytest.mark.parametrize("way", WAYS)
def test_4_the_forward_saves_it(way: str) -> None:
    """The graph keeps it when its user does not."""
    x = leaf()

    def call() -> Tensor:
        state = BackwardState()
        loss = run(scaled, way)(x, state)
        state.scale = 5.0
        return loss

    loss = call()
    gc.collect()
    loss.backward()
    torch.testing.assert_close(x.grad, 5 * x.sin().exp() * x.cos())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("one_state", [True, False])
def test_5_it_is_an_input_of_its_own_backward_with_many_in_flight(way: str, one_state: bool) -> None:
    states = [BackwardState() for _ in range(4)]
    if one_state:
        states = states[:1] * 4
    seen: list[tuple[int, int]] = []

    def forward(x: Tensor, state: BackwardState, number: Any) -> Tensor:
        y = state.on_grad(x.sin(), lambda grad: seen.append((number(), state.number)))
        return state.on_grad(y.exp(), lambda grad: seen.append((number(), state.number))).sum()

    compiled, x = run(forward, way), leaf()
    losses = []
    with no_recompile():
        for i, state in enumerate(states):
            losses.append(compiled(x, state, lambda i=i: i))
            state.number = i
        for i in (2, 0, 3, 1):
            losses[i].backward()
    assert seen == [(i, i) for i in (2, 2, 0, 0, 3, 3, 1, 1)]


@pytest.mark.parametrize("way", COMPILED)
def test_6_a_second_state_in_a_graph_is_an_error(way: str) -> None:
    first, second = BackwardState(), BackwardState()

    def forward(x: Tensor) -> Tensor:
        return second.on_grad(first.on_grad(x.sin(), print).exp(), print)

    with pytest.raises(StateError, match="a compiled graph cannot use two states"):
        run(forward, way)(leaf())


@pytest.mark.parametrize("way", COMPILED)
def test_6_a_state_in_two_graphs_is_an_error(way: str) -> None:
    state, x = BackwardState(), leaf()

    def sine(x: Tensor) -> Tensor:
        return state.on_grad(x.sin(), lambda grad: None).sum()

    def cosine(x: Tensor) -> Tensor:
        return state.on_grad(x.cos(), lambda grad: None).sum()

    one, other = run(sine, way), run(cosine, way)
    loss = one(x)
    with pytest.raises(StateError, match="a state cannot be used in two compiled graphs"):
        other(x)
    loss.backward()
    other(x).backward()  # one after the other is two rides
    torch.testing.assert_close(x.grad, x.cos() - x.sin())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, at a break
def test_6_a_graph_break_between_two_hooks_is_an_error() -> None:
    state = BackwardState()

    def forward(x: Tensor) -> Tensor:
        y = state.on_grad(x.sin(), print)
        torch._dynamo.graph_break()
        return state.on_grad(y.exp(), print)

    with pytest.raises(StateError, match=r"two compiled graphs; .*graph break"):
        torch.compile(forward, backend="aot_eager")(leaf())
