"""A module's backward hook through a state, beside torch's own in eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import assert_same_grads, twin
from sternway.errors import StateError
from sternway.state import BackwardState
from ways import WAYS, run


class Mixer(nn.Module):
    """Two inputs and something that is no tensor; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor, factor: float, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(a) * b, a + factor * b


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixer, self.last = nn.Linear(4, 4), Mixer(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a, b = self.mixer(h.sin(), 2.0, h.cos())
        a, b = self.mixer(a, 3.0, b)  # the same module twice
        return self.last(a * b).sum()


class Record:
    """A hook that keeps what it is called with, and may double the inputs' gradients."""

    def __init__(self, doubles: bool = False) -> None:
        self.calls: list[Any] = []
        self.doubles = doubles

    def __call__(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.calls.append((type(module).__name__, grad_input, grad_output))
        if self.doubles:
            return tuple(None if grad is None else 2 * grad for grad in grad_input)
        return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")  # the first layer's
def test_equal_to_torchs_hook_in_eager_code(way: str, doubles: bool) -> None:
    x = torch.randn(3, 4)
    model = Model()
    reference, _ = twin(model, x)
    ours, theirs, state = Record(doubles), Record(doubles), BackwardState()
    for name in ("first", "mixer", "last"):
        state.on_module(getattr(model, name), ours)
        getattr(reference, name).register_full_backward_hook(theirs)
    run(model, way)(x).backward()
    reference(x).backward()
    assert [name for name, *_ in ours.calls] == ["Linear", "Mixer", "Mixer", "Linear"]
    torch.testing.assert_close([call[1:] for call in ours.calls], [call[1:] for call in theirs.calls])
    assert_same_grads(model, reference)


@pytest.mark.parametrize("way", WAYS)
def test_a_removed_hook_is_not_called(way: str) -> None:
    model, record = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Record()
    handle = BackwardState().on_module(model[1], record)
    compiled, x = run(model, way), torch.randn(2, 4)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    handle.remove()
    compiled(x).sum().backward()
    assert len(record.calls) == 1


@pytest.mark.parametrize("way", WAYS)
def test_values_and_a_second_backward(way: str) -> None:
    model, seen, state = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [], BackwardState()
    state.on_module(model[1], lambda module, grad_input, grad_output: seen.append(state.step))
    loss = run(model, way)(torch.randn(2, 4)).sum()
    state.step = 1
    loss.backward(retain_graph=True)
    state.step = 2
    loss.backward()
    assert seen == [1, 2]


def test_what_cannot_be_watched() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    module, x = Named(), torch.ones(2, requires_grad=True)
    BackwardState().on_module(module, Record())
    with pytest.raises(StateError, match="must return a tensor or a tuple; got a dict from Named"):
        module(x)


def test_a_hook_that_returns_too_few() -> None:
    layer = nn.Linear(4, 4)
    BackwardState().on_module(layer, lambda module, grad_input, grad_output: ())
    loss = layer(torch.ones(1, 4, requires_grad=True)).sum()
    with pytest.raises(StateError, match="one gradient for each input; got 0 for 1"):
        loss.backward()
