"""One self-contained, offline HTML file from what any room exports as JSON: graphs, timelines, curves.

Example:
    >>> import tempfile
    >>> from sternway import viewer
    >>> bar = {"rank": 0, "label": "0F0", "op": "F", "microbatch": 0, "stage": 0, "start": 0.0, "end": 1.0}
    >>> step = {"ranks": 1, "series": [{"name": "planned", "events": [bar]}]}
    >>> viewer.write(tempfile.mktemp(suffix=".html"), title="A step", timelines=step).exists()
    True
"""

from sternway.viewer._write import render, write

__all__ = ["render", "write"]
