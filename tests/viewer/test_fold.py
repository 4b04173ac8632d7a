"""Graphs of deep models in a real Chromium: identical blocks in one box, class names, the largest saved tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from browser import Browser
from sternway import graph
from sternway._bytes import show_bytes
from sternway.demo import GPT

VIEW = "sternway.views.Graph"
SHOWN = "[...document.querySelectorAll('.item')].map(e => e.querySelector('text').textContent.replace('▸ ', ''))"


@pytest.fixture(scope="module")
def captured() -> graph.Graph:
    torch.manual_seed(0)
    model = GPT(vocabulary=16, dim=8, heads=2, layers=24, length=8)
    with graph.record(model):
        loss = model(torch.zeros(2, 8, dtype=torch.long)).sum()
    return graph.capture(loss, model)


@pytest.fixture
def page(captured: graph.Graph, tmp_path: Path) -> Path:
    return captured.to_html(tmp_path / "graph.html", title="A GPT")


def press(browser: Browser, label: str) -> None:
    """Double-click a box."""
    browser.run(
        f"[...document.querySelectorAll('.item')].find(e => e.textContent.includes({json.dumps(label)}))"
        ".dispatchEvent(new MouseEvent('dblclick'))"
    )


def test_identical_blocks_are_one_box_and_one_of_them_opens(
    browser: Browser, page: Path, captured: graph.Graph
) -> None:
    browser.size(1400)
    browser.open(page)
    assert "24 × GPTBlock" in browser.run(SHOWN)  # at first sight: what is around it is open
    small = browser.run("[...document.querySelectorAll('.item .sub')].map(t => t.textContent)")
    blocks = captured.by_module(depth=1)["blocks"]
    assert any(text.startswith(f"blocks 0–23 · {blocks.nodes} nodes · ") for text in small)
    assert any(text.startswith("LayerNorm · ") for text in small)
    press(browser, "24 × GPTBlock")
    shown = browser.run(SHOWN)
    assert {"23 × GPTBlock", "norm1", "qkv", "down"} <= set(shown)
    assert shown.count("qkv") == 1
    headings = browser.run("[...document.querySelectorAll('text.heading')].map(t => t.textContent)")
    assert any("0 · GPTBlock" in text for text in headings)
    counts = browser.run(f"{VIEW}.picture.items.map(i => i.group ? i.group.count : 1)")
    assert sum(counts) == len(captured.nodes)
    weights = browser.run(f"{VIEW}.picture.items.map(i => {VIEW}.picture.weight(i))")
    assert sum(weights) == captured.saved_bytes
    around = next(place for place, text in enumerate(headings) if "24 × GPTBlock" in text)
    browser.run(f"[...document.querySelectorAll('.open .handle')][{around}].dispatchEvent(new MouseEvent('click'))")
    assert "24 × GPTBlock" in browser.run(SHOWN)


def test_a_node_inside_is_found_and_the_rest_stays_folded(browser: Browser, page: Path, captured: graph.Graph) -> None:
    browser.size(1400)
    browser.open(page)
    browser.press("/")
    browser.type("blocks.12.up.weight")
    browser.press("Enter")
    (leaf,) = captured.find("blocks.12.up.weight")
    assert browser.run("document.querySelector('.item.chosen').dataset.node") == str(leaf.id)
    assert {"12 × GPTBlock", "11 × GPTBlock"} <= set(browser.run(SHOWN))
    browser.press("Escape")
    browser.press("c")
    browser.press("c")
    assert "12" in browser.run(SHOWN)  # the block itself, closed
    browser.press("c")
    assert "24 × GPTBlock" in browser.run(SHOWN)


def test_the_largest_saved_tensors_lead_to_their_nodes(browser: Browser, page: Path, captured: graph.Graph) -> None:
    browser.size(1400)
    browser.open(page)
    cells = (
        "[...document.querySelectorAll('#largest tbody tr')].map(r => [Number(r.dataset.key), r.cells[2].textContent])"
    )
    assert len(browser.run(cells)) == 10
    browser.run("document.querySelector('#largest button.more').click()")
    first = {}
    for kept in captured.saved:
        if kept.saved.storage is not None:
            first.setdefault(kept.saved.storage, kept)
    sizes = sorted((k.saved.storage_nbytes for k in first.values() if k.saved.role == "activation"), reverse=True)
    assert browser.run(f"{VIEW}.tree.kept().map(r => r.bytes)") == sizes
    rows = browser.run(cells)
    assert len(rows) == len(sizes)
    browser.run("document.querySelectorAll('#largest tbody tr')[3].click()")
    node = captured.nodes[rows[3][0]]
    assert browser.run("document.querySelector('.item.chosen').dataset.node") == str(node.id)
    assert node.kind in browser.run("document.getElementById('details').textContent")
    for expected in (max(sizes), min(sizes)):
        browser.run("document.querySelectorAll('#largest .sort')[2].click()")
        assert browser.run("document.querySelector('#largest tbody tr').cells[2].textContent") == show_bytes(expected)


def test_classes_are_shown(browser: Browser, page: Path) -> None:
    browser.size(1400)
    browser.open(page)
    browser.run(f"{VIEW}.picture.choose({VIEW}.picture.items.find(i => i.group && i.group.name === 'norm'))")
    assert "LayerNorm" in browser.run("document.getElementById('details').textContent")
    browser.run(f"{VIEW}.picture.choose({VIEW}.picture.items.find(i => i.group && i.group.isFold))")
    text = browser.run("document.getElementById('details').textContent")
    assert "blocks 0–23" in text
    assert "24 of the same structure" in text


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Odd(Even):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


def test_many_different_blocks_are_boxes_named_by_module(browser: Browser, tmp_path: Path) -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(*(Odd() if index % 2 else Even() for index in range(320)))})
    with graph.record(model):
        loss = model["blocks"](torch.ones(1, 2)).sum()
    captured = graph.capture(loss, model)
    browser.size(1400)
    browser.open(captured.to_html(tmp_path / "odd.html"))
    press(browser, "blocks")
    shown = [label for label in browser.run(SHOWN) if label.startswith("blocks ")]
    assert {"blocks 0–53", "blocks 270–319"} <= set(shown)


def test_blocks_fold_in_a_graph_that_was_not_recorded(browser: Browser, tmp_path: Path) -> None:
    """There the sum at the end of a block belongs to what is around the blocks."""
    model = GPT(vocabulary=16, dim=8, heads=2, layers=6, length=8)
    captured = graph.capture(model(torch.zeros(2, 8, dtype=torch.long)).sum(), model)
    browser.size(1400)
    browser.open(captured.to_html(tmp_path / "graph.html"))
    shown = browser.run(SHOWN)
    assert "6 × GPTBlock" in shown
    press(browser, "6 × GPTBlock")
    shown = browser.run(SHOWN)
    assert {"5 × GPTBlock", "qkv"} <= set(shown)
    counts = browser.run(f"{VIEW}.picture.items.map(i => i.group ? i.group.count : 1)")
    assert sum(counts) == len(captured.nodes)
    weights = browser.run(f"{VIEW}.picture.items.map(i => {VIEW}.picture.weight(i))")
    assert sum(weights) == captured.saved_bytes


def test_a_record_without_classes_still_folds(browser: Browser, captured: graph.Graph, tmp_path: Path) -> None:
    record = json.loads(captured.to_json())
    del record["classes"]
    older = graph.from_json(json.dumps(record))
    assert older.classes == ()
    browser.size(1400)
    browser.open(older.to_html(tmp_path / "older.html"))
    assert "24 × block" in browser.run(SHOWN)


@pytest.mark.parametrize(("width", "theme"), [(800, "light"), (1600, "dark")])
def test_no_overflow_and_no_barriers(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.size(width)
    browser.open(page)
    browser.run(f"document.documentElement.dataset.theme = '{theme}'")
    press(browser, "24 × GPTBlock")
    assert browser.overflow() <= 0
    assert browser.barriers() == []
