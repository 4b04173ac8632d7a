"""What is not allowed says so, as the same error in compiled code as in eager code."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sternway.errors import EmptyStateError, StateError
from sternway.state import BackwardState
from ways import COMPILED, WAYS, run


def leaf() -> Tensor:
    return torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize("way", WAYS)
def test_read_during_the_forward(way: str) -> None:
    state = BackwardState()

    def forward(x: Tensor) -> Tensor:
        return state.on_grad(x.sin(), print) * state.scale

    with pytest.raises(EmptyStateError, match="a value cannot be read before the backward"):
        run(forward, way)(leaf())


@pytest.mark.parametrize("way", COMPILED)
def test_read_in_compiled_code_though_the_last_step_left_a_value(way: str) -> None:
    state, x = BackwardState(), leaf()
    run(lambda x: state.on_grad(x.sin(), lambda grad: None).sum(), way)(x).backward()
    state.scale = 2.0
    with pytest.raises(EmptyStateError, match="cannot be read before the backward; got a read in compiled code"):
        run(lambda x: x * state.scale, way)(x)


@pytest.mark.parametrize("way", COMPILED)
def test_set_in_compiled_code(way: str) -> None:
    state = BackwardState()

    def forward(x: Tensor) -> Tensor:
        state.scale = 2.0
        return state.on_grad(x.sin(), print)

    with pytest.raises(StateError, match="a value cannot be set in the forward"):
        run(forward, way)(leaf())


@pytest.mark.parametrize("way", COMPILED)
def test_made_in_compiled_code(way: str) -> None:
    with pytest.raises(StateError, match="a state cannot be made in compiled code"):
        run(lambda x: BackwardState().on_grad(x.sin(), print).sum(), way)(leaf()).backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_needs_no_gradient(way: str) -> None:
    state = BackwardState()
    with pytest.raises(StateError, match="must require a gradient for one to arrive"):
        run(lambda x: state.on_grad(x.sin(), print), way)(torch.ones(2))


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_after_the_state_is_gone(way: str) -> None:
    state, x = BackwardState(), leaf()
    compiled = run(lambda x: state.on_grad(x.sin(), print).sum(), way)
    loss = compiled(x)
    state.value = "dropped"
    state.close()
    with pytest.raises(StateError, match=r"the state that this backward needs is gone; got a state that was closed"):
        loss.backward()
    with pytest.raises(StateError, match="a closed state cannot be used"):
        compiled(x)
    with pytest.raises(StateError, match="a closed state cannot be used"):
        state.value = "again"
    assert x.grad is None
    assert repr(state) == "BackwardState(closed)"


@pytest.mark.parametrize("way", COMPILED)
def test_what_the_forward_saved_was_copied_elsewhere(way: str) -> None:
    """Hooks that replace saved tensors by copies lose the state, and that is said."""
    state, x = BackwardState(), leaf()
    compiled = run(lambda x: state.on_grad(x.sin(), print).sum(), way)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = compiled(x)
    with pytest.raises(StateError, match="what the forward saved was copied"):
        loss.backward()


def test_recomputed_in_one_compiled_graph_is_refused() -> None:
    state = BackwardState()

    def forward(x: Tensor) -> Tensor:
        return checkpoint(lambda x: state.on_grad(x.sin(), print).exp(), x, use_reentrant=False)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Unsafe side effect"):
        run(forward, "aot_eager")(leaf())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (
            lambda grad: grad[0],
            r"same shape, dtype and device; got float32\[4\] on cpu in place of float32\[4, 4\] on cpu",
        ),
        (lambda grad: grad.double(), r"got float64\[4, 4\] on cpu"),
        (lambda grad: 1.0, "must return a gradient or None; got a float"),
    ],
)
def test_what_a_hook_may_return(way: str, returned: Any, match: str) -> None:
    state = BackwardState()
    loss = run(lambda x: state.on_grad(x.sin(), returned).exp().sum(), way)(leaf())
    with pytest.raises(StateError, match=match):
        loss.backward()


def test_a_hook_that_is_no_function() -> None:
    with pytest.raises(StateError, match="a hook must be a function; got str"):
        BackwardState().on_grad(leaf(), "print")  # type: ignore[arg-type]


def test_a_value_that_was_not_set() -> None:
    state, seen = BackwardState(), []
    loss = state.on_grad(leaf().sin(), lambda grad: seen.append(getattr(state, "missing", "none"))).sum()
    state.present = 1
    loss.backward()
    assert seen == ["none"]
    with pytest.raises(EmptyStateError, match=r"must be set before it is read; got \.missing of this forward"):
        _ = state.missing


@pytest.mark.parametrize("name", ["on_grad", "remove", "_wire"])
def test_a_value_does_not_hide_a_method(name: str) -> None:
    with pytest.raises(StateError, match="a value cannot have the name of a method"):
        setattr(BackwardState(), name, 1)


def test_a_copy_is_new_and_empty() -> None:
    state, x = BackwardState(), leaf()
    loss = state.on_grad(x.sin(), lambda grad: None).sum()
    state.value = 1
    loss.backward()
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert not hasattr(other, "value")
        other.on_grad(x.cos(), lambda grad: None).sum().backward()
    assert state.value == 1
    assert "value" in repr(state)
