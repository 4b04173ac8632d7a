"""Python between CUDA graphs, on a CPU: graphs that only say when they begin, end and are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sternway import split
from sternway._torch.captures import Places, capturing, current_capture, preparing
from sternway.errors import SplitError, StateError
from sternway.state import BackwardState


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs did, in order."""
    told: list[str] = []

    class ToldGraph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
            self.number = sum(each.startswith("begin") for each in told)
            told.append(f"begin {self.number} {capture_error_mode}")

        def capture_end(self) -> None:
            told.append(f"end {self.number}")

        def replay(self) -> None:
            told.append(f"replay {self.number}")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", ToldGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return told


def test_a_call_ends_the_capture_and_goes_on_in_another_graph(told: list[str]) -> None:
    places, key, count = Places(), object(), iter(range(10))
    arriving = torch.ones(2)
    with capturing("pool", places) as forward:
        places.add(key, lambda: next(count))
    with capturing("pool", places) as backward:
        (given,) = backward.pause(key, [arriving], lambda number, grads: [grads[0] * (number + 1)])
    assert told == ["begin 0 thread_local", "end 0", "begin 1 relaxed", "end 1", "begin 2 relaxed", "end 2"]
    assert given.tolist() == [0.0, 0.0]
    del told[:]
    first, second = places.begin(), places.begin()
    forward.replay()
    for begun, value, expected in ((second, 3.0, 6.0), (first, 5.0, 5.0)):
        arriving.fill_(value)
        backward.replay(begun)
        assert given.tolist() == [expected] * 2
    assert told == ["replay 0", "replay 1", "replay 2", "replay 1", "replay 2"]


@pytest.mark.parametrize("count", [1, 2])
def test_functions_of_a_state_are_called_in_replays_with_values_of_their_own(told: list[str], count: int) -> None:
    """As in a capture: tried, captured, and replayed for two microbatches of which the second is first."""
    state = BackwardState()
    seen: list[float] = []

    def look(grad: Any) -> Any:
        seen.append(state.scale)
        return grad * state.scale if count == 1 else {0: grad[0] * state.scale}

    def forward(x: Tensor) -> Tensor:
        shown = [state.on_grad(2 * x, look)] if count == 1 else state._show([2 * x, 3 * x], [look], again=False)
        return sum(shown).sum()

    x = torch.ones(2, requires_grad=True)
    (plain,) = torch.autograd.grad((sum((2 * x, 3 * x)[:count])).sum(), x)
    places = Places()
    with preparing():
        (tried,) = torch.autograd.grad(forward(x), x)
        assert torch.equal(tried, plain)
        with capturing("pool", places):
            y = forward(x)
    with capturing("pool", places) as backward:
        assert current_capture() is backward
        torch.autograd.grad(y, x)
    assert seen == []
    assert len(places.keys) == 1
    begun = []
    for scale in (10.0, 20.0):
        begun.append(places.begin())
        state.scale = scale
    backward.replay(begun[1])
    backward.replay(begun[0])
    assert seen == [20.0, 10.0]
    state.remove(look)  # of the two, not of those to come
    state.scale = 30.0
    backward.replay(begun[1])
    assert seen == [20.0, 10.0]
    begun[0] = places.begin()
    state.scale = 40.0
    backward.replay(begun[0])
    assert seen == [20.0, 10.0, 40.0]
    state.close()
    with pytest.raises(StateError, match="a closed state cannot be used"):
        places.begin()


def test_a_hook_of_another_forward_is_refused_in_a_capture(told: list[str]) -> None:
    state, x = BackwardState(), torch.ones(2, requires_grad=True)
    y = state.on_grad(2 * x, print).sum()
    with pytest.raises(StateError, match="run in Python, which a CUDA graph does not"), capturing("pool", Places()):
        torch.autograd.grad(y, x)


def test_steps_that_cannot_be_captured_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(SplitError, match=r"no numbers in Python; got AdamW without capturable=True.*Fix: make it with"):
        split.capture_step(torch.optim.AdamW([weight]))
    with pytest.raises(SplitError, match=r"parameters on one CUDA device; got parameters on cpu.*Fix: call model\.to"):
        split.capture_step(torch.optim.SGD([weight], 0.1))
