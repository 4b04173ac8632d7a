"""One self-contained, offline HTML file: a graph to walk in, or a report of timelines, bars, curves and tables.

Example:
    >>> import tempfile
    >>> from sternway import viewer
    >>> run = viewer.LaneRun("planned", [viewer.LaneEvent(0, "0F0", "F", 0.0, 1.0, stage=0, microbatch=0)])
    >>> viewer.write(tempfile.mktemp(suffix=".html"), title="A step", sections=[viewer.Lanes("Step", [run])]).exists()
    True
"""

from sternway.viewer._sections import (
    Bar,
    Bars,
    Cell,
    Curve,
    Curves,
    LaneEvent,
    LaneRun,
    Lanes,
    PageSection,
    Sheet,
    Terms,
    Verdict,
)
from sternway.viewer._write import render, write

__all__ = [
    "Bar",
    "Bars",
    "Cell",
    "Curve",
    "Curves",
    "LaneEvent",
    "LaneRun",
    "Lanes",
    "PageSection",
    "Sheet",
    "Terms",
    "Verdict",
    "render",
    "write",
]
