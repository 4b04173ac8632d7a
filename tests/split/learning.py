"""What tests of learned Functions share: a clock that does not depend on the machine, and the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from functions import QuantizedLinear, Recipe
from torch import Tensor, nn
from torch.autograd import Function

from compare import assert_split_equals_backward, names
from sternway import split
from sternway.split.learned import _effects, _record, _try

EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture(autouse=True)
def learning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every Function may be tried, and the clock stands still, so that each that can be split gains."""
    monkeypatch.setattr(_try, "clock", lambda: 0.0)
    monkeypatch.setattr(_effects, "is_alone", lambda: True)  # pytest may have threads of its own
    _record.CHOSEN.clear()
    _record.RECORDS.clear()
    split.learn(Function)
    yield
    _record.CHOSEN.clear()
    _record.RECORDS.clear()


def row(name: str) -> split.FunctionKind:
    (found,) = [each for each in split.kinds() if each.name.endswith(f".{name}")]
    return found


def assert_splits(model: nn.Module, *inputs: Any, waits: set[str], **options: Any) -> None:
    """Equal to a plain backward in the round that tries, and in those that split; then these parameters wait."""
    first = assert_split_equals_backward(model, *inputs, rounds=1, **EXACT, **options)
    assert not waits & names(model, first.deferred)
    for rounds, tolerance in ((1, EXACT), (2, {})):  # the second adds to .grad, which rounds once less
        pending = compare(model, *inputs, rounds=rounds, **tolerance, **options)
        assert waits <= names(model, pending.deferred)
    model.zero_grad()


def compare(model: nn.Module, *inputs: Any, **options: Any) -> split.Pending:
    """``assert_split_equals_backward``, for a model that may have gradients of an earlier comparison."""
    model.zero_grad()
    return assert_split_equals_backward(model, *inputs, **options)


class Quantized(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layer, self.recipe, self.bias = nn.Linear(8, 6), Recipe(), bias
        self.before = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.layer.bias if self.bias else None
        return QuantizedLinear.apply(self.before(x).tanh(), self.layer.weight, bias, self.recipe, self.bias)
