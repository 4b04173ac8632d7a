"""Measured facts: run apart, put on the pages of the files that define the modules, dropped when those change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sternway import atlas
from sternway.errors import AtlasError

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x):
        return torch.relu(self.up(x))


def sample():
    print("noise on the way")
    return nn.Sequential(Block(), nn.Linear(8, 4)), torch.ones(3, 4)


def forever():
    while True:
        pass


def wrong():
    return 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.py").write_text(MODEL)
    (tmp_path / "src" / "other.py").write_text("x = 1\n")
    return tmp_path / "src"


def test_measured_facts_are_on_the_page(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = atlas.build(source, out, measure=f"{source}/model.py:sample")
    assert report.ok
    page = (out / "model.py_docs.md").read_text()
    measured = page.partition("## Measured")[2].partition("\n## ")[0]
    assert "| `Block` | `0` | 40 | " in measured
    assert "forward (F)" in measured
    assert re.search(
        r"\| `Block` \| `0` \| 40 \| \d+ \| \d+ \| \d+\.\d+ \| \d+\.\d+ \| \d+\.\d+ \| \[line 5\]", measured
    )
    assert "(_site/backward.html)" in measured
    assert "Backward of sample" in (out / "_site" / "backward.html").read_text()
    assert "[drawn](_site/backward_Block.html)" in measured
    assert "Backward of Block" in (out / "_site" / "backward_Block.html").read_text()
    assert "[graph](_site/backward_Block.html)" in (out / "backward.md").read_text()
    assert "76 parameters" in measured
    assert "nodes in the backward graph" in measured
    assert "torch" in measured
    assert atlas.build(source, out).written == 0  # kept while the files are the same
    assert atlas.check(source, out).ok
    (source / "other.py").write_text("x = 2\n")
    atlas.build(source, out)
    assert "forward (F)" in (out / "model.py_docs.md").read_text()
    (source / "model.py").write_text(MODEL + "\n# changed\n")
    assert not atlas.check(source, out).ok
    atlas.build(source, out)
    assert "## Measured" not in (out / "model.py_docs.md").read_text()
    assert not (out / "_site" / "backward.html").exists()


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("model.py:forever", "must end within 1 s.*still running"),
        ("model.py:wrong", "failed; got .*must return a model and a sample"),
        ("nowhere.py:x", "must be path/to/file.py:function"),
    ],
)
def test_what_cannot_be_measured(source: Path, tmp_path: Path, target: str, match: str) -> None:
    with pytest.raises(AtlasError, match=match):
        atlas.build(source, tmp_path / "out", measure=target, measure_seconds=1 if "forever" in target else 300)
