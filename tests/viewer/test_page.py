"""The page as text: everything in one file, nothing from outside, names escaped, wrong data refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sternway import viewer
from sternway.errors import ViewerError

GRAPH = {"format": "sternway.graph", "version": 1, "torch": "x", "nodes": [], "tensors": [], "roots": []}


def lanes(name: str = "planned", **event: object) -> viewer.Lanes:
    given = {"rank": 0, "label": "2F0", "op": "F", "start": 0.0, "end": 1.0} | event
    return viewer.Lanes("Step", [viewer.LaneRun(name, [viewer.LaneEvent(**given)])])


def test_one_file_and_no_network() -> None:
    page = viewer.render(title="A", graph=GRAPH)
    assert not re.search(r"""(src|href)\s*=\s*["']|url\((?!#)|@import|fetch\(|XMLHttpRequest""", page)
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page  # the layout library's licence goes with it
    assert not re.search(r"@[A-Z]+@", page)


def test_titles_and_data_are_escaped() -> None:
    evil = "</script><script>alert(1)</script><!--"
    page = viewer.render(title=evil, sections=[lanes(evil, label=evil)])
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
        ({"sections": [{"series": []}]}, "a section must be one of the viewer's; got dict"),
        ({"sections": [lanes(rank=-1)]}, "an action must have a rank from 0 on, and end after its start; got 2F0 on"),
        ({"sections": [lanes(end=-1.0)]}, "got 2F0 on rank 0 from 0.0 to -1.0"),
        ({"sections": [lanes(end=float("inf"))]}, "the data of a report must be what JSON can hold"),
        ({"sections": [viewer.Lanes("a", [3])]}, "the data of a report must be what JSON can hold"),
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
