"""The viewer in a real Chromium: opens, expands, searches, shows Python's bytes, takes keys, complains of nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import gpt
from torch import nn

from browser import Browser
from sternway import graph, viewer

VIEW = "sternway.views.Graph"


@pytest.fixture(scope="module")
def captured() -> graph.Graph:
    torch.manual_seed(0)
    model = gpt(16, 3, heads=2)
    with graph.record(model):
        loss = model(torch.randn(2, 5, 16)).sum()
    return graph.capture(loss, model)


@pytest.fixture
def page(captured: graph.Graph, tmp_path: Path) -> Path:
    return captured.to_html(tmp_path / "graph.html", title="A GPT")


def _boxes(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.item')].map(e => e.dataset.module ?? e.dataset.node)")


def test_opens_closed_and_shows_the_bytes_of_python(browser: Browser, page: Path, captured: graph.Graph) -> None:
    browser.open(page)
    assert browser.run("document.getElementById('title').textContent") == "A GPT"
    assert {"0", "1", "2"} <= set(_boxes(browser))
    assert "0.up" not in _boxes(browser)
    assert browser.run(f"{VIEW}.tree.total") == captured.saved_bytes
    rows = browser.run(f"[...moduleRows({VIEW}.tree).values()].map(r => [r.module, r.nodes, r.bytes])")
    assert {name: (nodes, size) for name, nodes, size in rows} == {
        name: (row.nodes, row.saved_bytes) for name, row in captured.by_module().items()
    }
    shown = browser.run("[...document.querySelectorAll('#modules tbody tr')].map(r => r.dataset.key)")
    assert set(shown) == set(captured.by_module())
    for name, row in captured.by_module(depth=1).items():
        if name:
            assert browser.run(f"{VIEW}.tree.modules.get({json.dumps(name)}).bytes") == row.saved_bytes


def test_expands_and_closes_by_mouse_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('.item[data-module=\"1\"]').dispatchEvent(new MouseEvent('dblclick'))")
    assert {"1.up", "1.norm1", "0"} <= set(_boxes(browser))
    assert "1" not in _boxes(browser)
    assert browser.run("document.querySelectorAll('.open').length") == 1
    browser.press("c")
    assert "1" in _boxes(browser)
    browser.run("document.querySelector('.item[data-module=\"2\"]').focus()")
    browser.press("Enter")
    assert "2.up" in _boxes(browser)
    before = browser.run(f"{VIEW}.picture.chosen.key")
    browser.press("ArrowDown")
    assert browser.run(f"{VIEW}.picture.chosen.key") != before
    browser.press("+")
    browser.press("0")
    browser.press("t")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.press("t")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 249)"


def test_searches(browser: Browser, page: Path, captured: graph.Graph) -> None:
    browser.open(page)
    browser.press("/")
    browser.type("1.up.weight")
    assert browser.run("document.getElementById('found').textContent") == "1 found"
    browser.press("Enter")
    (leaf,) = captured.find("1.up.weight")
    assert str(leaf.id) in _boxes(browser)
    assert "1.up.weight" in browser.run("document.getElementById('details').textContent")
    browser.press("Escape")
    assert browser.run("document.getElementById('found').textContent") == ""
    browser.press("/")
    browser.type("gelu")
    assert browser.run("document.querySelectorAll('.item.hit').length") >= 1
    assert browser.run("document.getElementById('found').textContent") == "3 found"


def test_shows_a_node_and_the_way_to_it(browser: Browser, page: Path, captured: graph.Graph) -> None:
    browser.open(page)
    (leaf,) = captured.find("0.up.weight")
    top = captured.roots[0][0]
    browser.run(f"{VIEW}.picture.reveal({top})")
    browser.run(f"{VIEW}.picture.reveal({leaf.id})")
    browser.press("p")
    way = browser.run(f"{VIEW}.picture.way")
    assert way == [node.id for node in captured.path(top, leaf)]
    assert f"A way of {len(way)} nodes" in browser.run("document.getElementById('details').textContent")
    assert browser.run("document.querySelectorAll('.item.way').length") > 1
    assert browser.run("document.querySelectorAll('path.edge.way').length") > 1
    gelu = captured.find("GeluBackward0")[0]
    browser.run(f"{VIEW}.picture.reveal({gelu.id})")
    text = browser.run("document.getElementById('details').textContent")
    assert "GeluBackward0" in text
    assert gelu.source in text
    assert "Saved: self" in text


@pytest.mark.parametrize("colour", ["bytes", "kind", "name"])
def test_colours(browser: Browser, page: Path, colour: str) -> None:
    browser.open(page)
    browser.run(
        f"(c => {{ c.value = '{colour}'; c.dispatchEvent(new Event('change')); }})(document.getElementById('colour'))"
    )
    assert len(set(browser.run("[...document.querySelectorAll('.item rect')].map(r => r.getAttribute('fill'))"))) > 1


def test_difference_of_two_graphs(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    captured = []
    for middle in (nn.Identity(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
        with graph.record(model):
            loss = model(torch.ones(2, 4)).sum()
        captured.append(graph.capture(loss, model))
    before, after = captured
    browser.open(before.to_html(tmp_path / "diff.html", other=after))
    rows = browser.run(f"{VIEW}.changes.map(c => [c.module, c.before.bytes, c.after.bytes])")
    expected = [(change.module, change.bytes_before, change.bytes_after) for change in before.diff(after).changes]
    assert sorted(map(tuple, rows)) == sorted(expected)
    assert "+1 ReluBackward0" in browser.run("document.getElementById('diff').textContent")
    assert browser.run("document.querySelector('.item.added').dataset.module") == "1"


def test_names_are_text(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)><script>owned=1</script>"
    model = nn.ModuleDict({evil: nn.Linear(2, 2)})
    page = graph.capture(model[evil](torch.ones(1, 2)).sum(), model).to_html(tmp_path / "evil.html", title=evil)
    browser.open(page)
    assert browser.run("document.getElementById('title').textContent") == evil
    assert evil in _boxes(browser)
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("window.owned === undefined")


def test_a_long_chain_opens_closed_and_stays_usable(browser: Browser, tmp_path: Path) -> None:
    x = torch.ones(1, requires_grad=True)
    for _ in range(20_000):
        x = x * 1.5
    captured = graph.capture(x)
    browser.open(captured.to_html(tmp_path / "chain.html"))
    assert 1 < len(_boxes(browser)) <= 60
    browser.run(f"{VIEW}.picture.reveal(10000)")
    assert "10000" in _boxes(browser)
    assert len(_boxes(browser)) < 700


def test_a_graph_and_a_report_in_one_page(browser: Browser, captured: graph.Graph, tmp_path: Path) -> None:
    events = [viewer.LaneEvent(rank, f"{rank}F0", "F", 0.0, 1.0) for rank in range(2)]
    page = viewer.write(
        tmp_path / "step.html",
        title="A step",
        graph=json.loads(captured.to_json()),
        sections=[
            viewer.Lanes("Step", [viewer.LaneRun("planned", events)]),
            viewer.Curves("Loss", [viewer.Curve("ours", [(0, 2.0), (1, 1.5), (2, 1.25)])], x="step", y="loss"),
        ],
    )
    browser.open(page)
    tabs = browser.run("[...document.querySelectorAll('[role=tab]')].map(t => t.textContent)")
    assert tabs == ["Graph", "Report"]
    browser.run("document.querySelectorAll('[role=tab]')[1].click()")
    browser.settle()
    assert browser.run("document.querySelectorAll('#report rect.event').length") == 2
    assert browser.run("document.querySelector('#report polyline').getAttribute('points').split(' ').length") == 3
    titles = browser.run("[...document.querySelectorAll('#report circle title')].map(t => t.textContent)")
    assert titles[1] == "ours: loss 1.5 at step 1"
