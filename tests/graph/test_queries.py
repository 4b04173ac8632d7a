"""Questions to a captured graph."""

from __future__ import annotations

import pytest
import torch
from models import convnet, gpt, llama
from torch import nn

from compare import names
from sternway import graph, split
from sternway.errors import GraphError


class Two(nn.Module):
    """Two ways to the loss, one of them frozen in part, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.left(x)).relu() + self.right(x)


@pytest.fixture
def captured() -> graph.Graph:
    torch.manual_seed(0)
    model = Two()
    return graph.capture(model(torch.randn(3, 4)).sum(), model)


def test_by_module(captured: graph.Graph) -> None:
    rows = captured.by_module()
    assert set(rows) == {"", "left", "right"}
    assert dict(rows["left"].kinds) == {"AccumulateGrad": 2, "TBackward0": 1, "AddmmBackward0": 1}
    assert captured.by_module(depth=0)[""].nodes == len(captured.nodes)
    with pytest.raises(GraphError, match="depth must be 0 or more; got -1"):
        captured.by_module(depth=-1)


def test_numbered_modules_come_in_order() -> None:
    model = gpt(8, 12, heads=2)
    g = graph.capture(model(torch.randn(1, 2, 8)).sum(), model)
    layers = [name for name in g.by_module(depth=1) if name]
    assert layers == [str(index) for index in range(12)]
    assert g.by_module(depth=1)["3"].nodes == sum(row.nodes for n, row in g.by_module().items() if n.startswith("3"))


def test_between_and_path(captured: graph.Graph) -> None:
    top = captured.roots[0][0]
    way = captured.path(top, "left.weight")
    assert [node.kind for node in way] == [
        "SumBackward0",
        "AddBackward0",
        "ReluBackward0",
        "AddmmBackward0",
        "AddmmBackward0",
        "TBackward0",
        "AccumulateGrad",
    ]
    assert captured.path("left.weight", top) == way[::-1]
    assert set(captured.between("left.weight", top)) == set(way)
    assert captured.path("left.weight", "right.weight") == ()
    assert captured.between("left.weight", "right.weight") == ()
    assert len(captured.between(top, "left")) == len(way) + 1  # the bias too
    assert captured.find("ReluBackward0") == [captured.nodes[way[2].id]] == captured.find(way[2])
    with pytest.raises(GraphError, match=r"must be given by its id, or by the name.*got 'nowhere'"):
        captured.path("nowhere", top)
    with pytest.raises(GraphError, match="got 999"):
        captured.find(999)


def test_unused_and_frozen(captured: graph.Graph) -> None:
    assert captured.unused_parameters() == ("unused.weight", "unused.bias")
    (use,) = captured.frozen_paths()
    assert (use.parameter, use.leads_to) == ("frozen.weight", ("left.bias", "left.weight"))
    bare = graph.capture(torch.ones(1, requires_grad=True) * 1)
    with pytest.raises(GraphError, match=r"need the model.*model=model"):
        bare.unused_parameters()


def test_largest_saved() -> None:
    x = torch.ones(10, requires_grad=True)
    y = x.exp()
    g = graph.capture(y.sum() + torch.ones(1000, requires_grad=True).exp().sum())
    sizes = [kept.saved.storage_nbytes for kept in g.largest_saved()]
    assert sizes == [4000, 40]
    assert str(g.largest_saved(1)[0]).startswith("4,000 bytes: float32 1000 as 'result' of ExpBackward0")
    assert g.by_device() == {"cpu": 4040}


def test_diff_by_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with graph.record(model):
        before = graph.capture(model(torch.ones(2, 4)).sum(), model)
    model[1] = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with graph.record(model):
        after = graph.capture(model(torch.ones(2, 4)).sum(), model)
    diff = before.diff(after, depth=1)
    (change,) = diff.changes
    assert (change.module, change.removed) == ("1", ())
    assert dict(change.added) == {"AccumulateGrad": 2, "AddmmBackward0": 1, "ReluBackward0": 1, "TBackward0": 1}
    assert change.bytes_after - change.bytes_before == 64
    assert "+1 ReluBackward0" in str(diff)
    assert not before.diff(before)
    assert str(before.diff(before)) == "no difference"
    assert after.diff(before, depth=1).changes[0].removed == change.added


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda: gpt(16, 2), (2, 5, 16)), (lambda: llama(16, 2), (2, 5, 16)), (lambda: convnet(8, 2), (2, 3, 8, 8))],
)
@pytest.mark.parametrize("first_stage", [False, True])
def test_the_split_preview_is_what_the_split_does(make: object, shape: tuple, first_stage: bool) -> None:
    model = make()
    x = torch.randn(shape, requires_grad=not first_stage)
    loss = model(x).sum()
    preview = graph.capture(loss, model).split_preview()
    _, pending = split.backward_input(loss, None, [] if first_stage else x)
    assert {name for wait in preview.waits for name in wait.parameters} == names(model, pending.deferred)
    assert set(preview.ready) == names(model, pending.ready)
    assert "parameters wait for W" in str(preview)


def test_a_graph_that_the_split_refuses_says_so() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Linear(4, 4)
    loss = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum()
    preview = graph.capture(loss, model).split_preview()
    assert preview.refused is not None
    assert str(preview).startswith("cannot be split: ")
