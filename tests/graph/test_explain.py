"""What goes wrong, in words: each message names the cause, the line and the fix."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from torch import Tensor, nn

from gloo import on_ranks
from sternway import graph
from sternway.errors import BackwardError, GraphError


@pytest.fixture(autouse=True)
def _all_is_seen() -> None:
    gc.unfreeze()  # who holds a tensor is asked of the collector


def _line(text: str) -> int:
    """The number of the first line of this file that contains ``text``."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line and "_line(" not in line)


def test_inplace_names_who_saved_and_who_changed() -> None:
    x = torch.ones(3, requires_grad=True)

    def forward() -> Tensor:
        hidden = x.exp()  # saved here
        twice = hidden * 2
        hidden.add_(1)  # changed here
        hidden[0] = 5  # and here
        return twice.sum() + hidden.sum()

    with pytest.raises(BackwardError) as caught, graph.explain_inplace():
        loss = forward()
        loss.backward()
    text = str(caught.value)
    assert "a float32 tensor of shape (3,)" in text
    assert f"saved by exp (ExpBackward0, slot 'result') at tests/graph/test_explain.py:{_line('# saved here')}" in text
    assert f"changed by add_ at tests/graph/test_explain.py:{_line('# changed here')} in forward (to version 1)" in text
    assert f"then __setitem__ at tests/graph/test_explain.py:{_line('# and here')}" in text
    assert "at version 0" in text
    assert "add for add_" in text
    assert "modified by an inplace operation" in str(caught.value.__cause__)


@pytest.mark.parametrize("change", ["x += 1", "x.relu_()", "torch.add(x, 1, out=x)", "x.view(-1)[0] = 2"])
def test_inplace_in_many_forms(change: str) -> None:
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(BackwardError, match=r"changed by \w+ at <string>:1"), graph.explain_inplace():
        x = leaf * 1
        loss = (x * x).sum()
        with torch.no_grad():
            exec(change, {"x": x, "torch": torch})
        loss.backward()


def test_inplace_on_a_parameter_by_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(BackwardError, match=r"parameter 1\.weight.*changed by _foreach_add_|add_"),
        graph.explain(model),
    ):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, graph.explain():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not isinstance(caught.value, BackwardError)
    x = torch.ones(2, requires_grad=True)
    loss = x.exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time") as caught, graph.explain_inplace():
        loss.backward()
    assert not isinstance(caught.value, BackwardError)


def test_a_second_backward() -> None:
    model = nn.Linear(2, 2)
    with (
        pytest.raises(BackwardError, match=r"all of this graph was used before.*retain_graph=True"),
        graph.explain(model),
    ):
        loss = model(torch.ones(1, 2)).exp().sum()
        loss.backward()
        loss.backward()
    with pytest.raises(BackwardError, match=r"a part of this graph.*TanhBackward0.*detach\(\)"), graph.explain():
        weight = torch.ones(2, requires_grad=True)
        state = torch.ones(2)
        for _ in range(2):
            state = (state * weight).tanh()
            state.sum().backward()
    with pytest.raises(BackwardError, match=r"a second backward through a part"), graph.explain():
        loss = weight.exp().sum()
        torch.autograd.grad(loss, weight)
        torch.autograd.grad(loss, weight)


def test_does_not_require_grad() -> None:
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with pytest.raises(BackwardError, match=r"dtype int64.*argmax"), graph.explain(model):
        model(x).argmax().backward()
    with pytest.raises(BackwardError, match=r"look for torch\.no_grad.*detach"), graph.explain(model):
        model(x).detach().sum().backward()
    with pytest.raises(BackwardError, match=r"inference_mode"), graph.explain(model):
        with torch.inference_mode():
            loss = model(x).sum()
        loss.backward()
    with pytest.raises(BackwardError, match=r"look for torch\.no_grad"), graph.explain(), torch.no_grad():
        model(x).sum().backward()
    model.requires_grad_(False)
    with pytest.raises(BackwardError, match=r"all of whose parameters are frozen"), graph.explain(model):
        model(x).sum().backward()


class _HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _train_with_an_unused_parameter(rank: int) -> None:
    model = _HalfUsed()
    parallel = nn.parallel.DistributedDataParallel(model)
    expected = r"none for idle\.weight, idle\.bias.*find_unused_parameters"
    with pytest.raises(BackwardError, match=expected), graph.explain(model):
        for _ in range(2):
            parallel(torch.ones(1, 2)).sum().backward()


def test_unused_parameters_under_ddp() -> None:
    """DDP's own message gives numbers."""
    on_ranks(2, _train_with_an_unused_parameter)
    with pytest.raises(BackwardError, match=r"some parameters"), graph.explain():
        raise RuntimeError("Expected to have finished reduction in the prior iteration")


class _Bad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * 0).sqrt()


def test_the_first_nonfinite_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), _Bad(), nn.Linear(2, 2))
    with graph.record(model):
        loss = model(torch.ones(1, 2)).sum()
    found = graph.find_nonfinite(loss, model)
    assert (found.phase, found.kind, found.module) == ("backward", "SqrtBackward0", "1")
    assert found.source.endswith("in forward")
    assert "±inf" in found.made
    assert re.match(r"\|x\| in \[", found.got)
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()  # the graph can still be used
    assert graph.find_nonfinite(nn.Linear(2, 2)(torch.ones(1, 2)).sum()) is None
    with pytest.raises(GraphError, match="loss must be a scalar"):
        graph.find_nonfinite(torch.ones(2, requires_grad=True) * 1)


def test_the_first_nonfinite_value_of_a_recorded_forward() -> None:
    model = nn.Linear(2, 2)
    with graph.record(model, values=True) as recording:
        hidden = model(torch.ones(1, 2))
        loss = (hidden / 0).tanh().log().sum()
    found = graph.find_nonfinite(loss)
    assert (found.phase, found.kind) == ("forward", "div")
    assert "2 ±inf of 2" in found.made
    assert str(found).startswith("forward: div in no module at tests/graph/test_explain.py:")
    assert recording.first_nonfinite.op == "div"
    unrecorded = graph.find_nonfinite((model(torch.ones(1, 2)) / 0).sum())
    assert unrecorded.kind == "the loss"
    assert "graph.record" in unrecorded.got


def test_why_alive() -> None:
    tensor = torch.ones(3)
    assert str(graph.why_alive(tensor)) == "nothing but the caller keeps it alive"
    cache = {"kept": [tensor]}

    def closure() -> Tensor:
        return tensor

    weight = torch.ones(3, requires_grad=True)
    product = weight * tensor
    text = str(graph.why_alive(tensor))
    assert re.search(r"\[0\] of a list ← \['kept'\] of a dict ← variable 'cache'", text)
    assert re.search(r"a variable of a closure ← .*closure", text)
    assert re.search(r"saved as 'other' by MulBackward0 ← the graph of a float32 tensor .* ← variable 'product'", text)
    del cache, closure, product
    gc.collect()
    assert "MulBackward0" not in str(graph.why_alive(tensor))


_KEPT = []


def test_why_alive_ends_at_globals_and_attributes() -> None:
    tensor = torch.ones(3)
    _KEPT.append(tensor)
    module = nn.Linear(1, 1)
    module.register_buffer("held", tensor)
    text = str(graph.why_alive(tensor))
    _KEPT.clear()
    assert re.search(r"\[0\] of a list ← global '_KEPT' of module", text)
    assert re.search(r"\['held'\] of a dict ← .*Linear ← variable 'module'", text)
