"""The page as text: everything in one file, nothing from outside, names escaped, wrong data refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sternway import viewer
from sternway.errors import ViewerError

GRAPH = {"format": "sternway.graph", "version": 1, "torch": "x", "nodes": [], "tensors": [], "roots": []}
EVENT = {"rank": 0, "label": "2F0", "op": "F", "microbatch": 0, "stage": 2, "start": 0.0, "end": 1.0}


def test_one_file_and_no_network() -> None:
    page = viewer.render(title="A", graph=GRAPH)
    assert not re.search(r"""(src|href)\s*=\s*["']|url\((?!#)|@import|fetch\(|XMLHttpRequest""", page)
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page  # the layout library's licence goes with it
    assert not re.search(r"@[A-Z]+@", page)


def test_titles_and_data_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><!--"
    page = viewer.render(title=evil, timelines={"series": [{"name": evil, "events": [EVENT | {"label": evil}]}]})
    assert evil not in page
    assert page.count("<script") == 3
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data)["title"] == evil


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "a report must show something"),
        ({"graph": {"nodes": []}}, "graph must be a graph as sternway.graph exports it; got format None"),
        ({"graph": GRAPH, "other": {}}, "other must be a graph"),
        ({"timelines": {"ranks": 2}}, "timelines must have series, each with a name and events; got keys ranks"),
        ({"timelines": {"series": [{"name": "a", "events": [{"rank": 0}]}]}}, "got one without label"),
        ({"curves": {"series": [{"name": "a"}]}}, "curves must have series, each with a name and points"),
    ],
)
def test_wrong_data_is_refused(data: dict, message: str) -> None:
    with pytest.raises(ViewerError, match=message):
        viewer.render(title="A", **data)


def test_assets_are_packaged() -> None:
    """Whatever the page is made of lies inside the package, and so in the wheel."""
    root = Path(viewer.__file__).parent
    assert (root / "vendor" / "dagre.LICENSE.txt").read_text().startswith("Copyright (c) 2012-2014 Chris Pettitt")
    assert (root / "vendor" / "dagre.min.js").stat().st_size > 40_000
