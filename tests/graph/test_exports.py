"""A graph for other programs and for people: JSON, DOT, networkx, text."""

from __future__ import annotations

import json

import pytest
import torch
from models import gpt
from torch import nn

from sternway import graph
from sternway.errors import GraphError


@pytest.fixture
def captured() -> graph.Graph:
    torch.manual_seed(0)
    model = gpt(8, 2, heads=2)
    with graph.record(model):
        loss = model(torch.randn(1, 3, 8, requires_grad=True)).sum()
    return graph.capture(loss, model)


def test_json_there_and_back(captured: graph.Graph) -> None:
    text = captured.to_json()
    record = json.loads(text)
    assert (record["format"], record["version"]) == ("sternway.graph", 1)
    assert record["saved_bytes"] == captured.saved_bytes
    back = graph.from_json(text)
    assert back == captured
    assert back.to_json() == text
    assert graph.from_json(graph.capture(torch.ones(1, requires_grad=True) * 2).to_json()).parameters is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "what Graph.to_json wrote; got 'nonsense'"),
        ("[]", "what Graph.to_json wrote"),
        (
            '{"format": "sternway.graph", "version": 99}',
            "can only read sternway.graph version 1; got sternway.graph version 99",
        ),
    ],
)
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        graph.from_json(text)


def test_dot(captured: graph.Graph) -> None:
    text = captured.to_dot()
    assert text.count(" -> ") == len(captured.edges)
    assert text.count("[label=") == len(captured.nodes)
    assert 'label="0.up"' in text
    odd = nn.ModuleDict({'a"b\\c': nn.Linear(1, 1)})
    assert 'label="a\\"b\\\\c";' in graph.capture(odd['a"b\\c'](torch.ones(1, 1)).sum(), odd).to_dot()


def test_networkx(captured: graph.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    networkx = pytest.importorskip("networkx", reason="networkx is not installed")
    made = captured.to_networkx()
    assert (made.number_of_nodes(), made.number_of_edges()) == (len(captured.nodes), len(captured.edges))
    assert networkx.is_directed_acyclic_graph(made)
    assert made.nodes[0]["kind"] == captured.nodes[0].kind
    monkeypatch.setitem(__import__("sys").modules, "networkx", None)
    with pytest.raises(GraphError, match="pip install networkx"):
        captured.to_networkx()


def test_text() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.spare = nn.Parameter(torch.ones(1))
    with graph.record(model):
        loss = model[2](model[1](model[0](torch.ones(3, 4)))).sum()
    text = graph.capture(loss, model).to_text()
    lines = text.splitlines()
    assert lines[0].startswith("10 nodes, 144 B saved for the backward (and 64 B of parameters and buffers")
    assert lines[1:5] == [
        "outside modules: 1 nodes, 0 B  Sum",
        "├─ 0: 4 nodes, 48 B  AccumulateGrad×2, T, Addmm",
        "├─ 1: 1 nodes, 96 B  Relu",
        "└─ 2: 4 nodes, 0 B  AccumulateGrad×2, T, Addmm",
    ]
    assert lines[-1] == "no gradient reaches: spare"


def test_text_depth_and_repr(captured: graph.Graph) -> None:
    shallow = captured.to_text(depth=1)
    assert "├─ 0: " in shallow
    assert "norm1" not in shallow
    assert "   ├─ norm1: " in captured.to_text()
    assert repr(captured).startswith(f"Graph({len(captured.nodes)} nodes, ")
    assert len(repr(captured).splitlines()) == 1
    assert str(captured.nodes[0]).startswith("AccumulateGrad [0]")


def test_print_says_the_most_important_in_a_few_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.spare = nn.Parameter(torch.ones(1))
    with graph.record(model):
        loss = model[2](model[1](model[0](torch.ones(3, 4)))).sum()
    lines = str(graph.capture(loss, model)).splitlines()
    assert lines[0].startswith("10 nodes, 144 B saved for the backward")
    assert lines[1] == "most saved by: 1 96 B, 0 48 B"
    assert lines[2] == "largest:"
    assert lines[-2:] == ["no gradient reaches: spare", "split: 4 parameters wait for W, 0 are computed in I"]
    bare = str(graph.capture(torch.ones(1, requires_grad=True) + 1)).splitlines()
    assert bare[0].startswith("2 nodes, 0 B saved")
    assert len(bare) == 1


def test_a_notebook_shows_a_table_of_modules() -> None:
    evil = "<script>"
    model = nn.ModuleDict({evil: nn.Linear(4, 4)} | {f"layer {index}": nn.Linear(4, 4) for index in range(25)})
    x = torch.ones(2, 4)
    for layer in model.values():
        x = layer(x).relu()
    html = graph.capture(x.sum(), model)._repr_html_()
    assert html.count("<tr>") == 21
    assert "<td>layer 0</td>" in html
    assert "20 of 27 modules" in html
    assert evil not in html
    assert "<td>&lt;script&gt;</td>" in html
