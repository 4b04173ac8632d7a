"""Python between CUDA graphs, on a CPU: graphs that only say when they begin, end and are replayed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sternway import split
from sternway._torch.captures import Places, capturing, current_capture, preparing
from sternway.errors import SplitError, StateError
from sternway.split.captured import _step
from sternway.split.captured._step import CapturedStep
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


def test_a_step_is_replayed_while_all_that_it_uses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that changes, a state that is loaded, a gradient elsewhere: a graph would use what was there."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    other = torch.nn.Parameter(torch.ones(3))
    reference = torch.optim.SGD([other], 0.1, momentum=0.9)

    class ToldStep:
        def __init__(self) -> None:
            self.used = self.all()

        def all(self) -> list[Any]:
            (group,), state = optimizer.param_groups, optimizer.state[weight]
            return [group["lr"], weight.grad.data_ptr(), state["momentum_buffer"].data_ptr()]

        def replay(self) -> None:
            assert self.all() == self.used
            optimizer.step()

    monkeypatch.setattr(_step, "_one_device", lambda optimizer: torch.device("cpu"))
    monkeypatch.setattr(CapturedStep, "_capture", lambda self: ToldStep())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    step, buffer = split.capture_step(optimizer), torch.zeros(3)
    for number in range(9):
        other.grad = torch.randn(3)
        weight.grad = buffer.copy_(other.grad)
        if number == 3:
            optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.2
        if number == 5:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 7:
            buffer = weight.grad = buffer.clone()
        before = step.replays
        step()
        reference.step()
        assert step.replays == before + (number not in (0, 3, 5, 7)), number
        assert torch.equal(weight, other)

    def another_rate() -> None:
        optimizer.param_groups[0]["lr"] += 0.1
        step()

    for _ in range(3):
        another_rate()
    with pytest.warns(UserWarning, match="the steps of SGD run as they are.*others in each step"):
        another_rate()
    another_rate()  # one warning for all
