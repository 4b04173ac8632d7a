"""Puts data, styles and scripts into one page. The page asks no network for anything, and is told not to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sternway.errors import ViewerError
from sternway.viewer._sections import PageSection, to_data

_HERE = Path(__file__).parent
_STYLES = ("style", "graph", "report")
_SCRIPTS = (
    "dom", "fold", "tree", "layout", "picture", "table", "graph",
    "timeline", "lanes", "hand", "panel", "charts", "main",
)  # fmt: skip

Json = Mapping[str, Any]


def write(
    path: str | Path,
    *,
    title: str,
    graph: Json | None = None,
    other: Json | None = None,
    sections: Sequence[PageSection] = (),
) -> Path:
    """Write a page to ``path`` and return it.

    Example:
        >>> import tempfile
        >>> from sternway.viewer import Curve, Curves
        >>> loss = Curves("Loss", [Curve("ours", [(0, 2.3), (1, 1.9)])], x="step", y="loss")
        >>> write(tempfile.mktemp(".html"), title="A run", sections=[loss]).exists()
        True

    Args:
        title: shown at the top.
        graph: a graph as ``sternway.graph`` exports it (docs/graph_json.md).
        other: a second graph: the page shows what changed from ``graph`` to it.
        sections: a report, one section below the other: ``Terms``, ``Verdict``, ``Bars``, ``Curves``, ``Lanes`` (a
            timeline) and ``Sheet`` (a table).

    Raises:
        ViewerError: nothing to show, or data of another shape.
    """
    ViewerError.unless(
        isinstance(path, str | Path) and str(path) != "", "a report must have a path", path, 'pass "report.html"'
    )
    path = Path(path)
    page = render(title=title, graph=graph, other=other, sections=sections)
    try:
        path.write_text(page, encoding="utf-8")
    except (OSError, ValueError) as error:  # a path may hold a zero byte
        raise ViewerError("the report cannot be written", got=str(error), fix="choose another path") from None
    return path


def render(
    *,
    title: str,
    graph: Json | None = None,
    other: Json | None = None,
    sections: Sequence[PageSection] = (),
) -> str:
    """The page as text; ``write`` says what goes in."""
    ViewerError.unless(isinstance(title, str), "title must be text", title, 'pass title="…"')
    ViewerError.unless(
        isinstance(sections, list | tuple), "sections must be a list", sections, "pass [viewer.Curves(…)]"
    )
    if graph is None and not sections:
        raise ViewerError("a report must show something", got="no data", fix="pass graph= or sections=")
    for name, value in (("graph", graph), ("other", other)):
        if value is None:
            continue
        ViewerError.unless(isinstance(value, Mapping), f"{name} must be a dict", value, "see viewer.write")
        if value.get("format") != "sternway.graph":
            raise ViewerError(
                f"{name} must be a graph as sternway.graph exports it",
                got=f"format {value.get('format')!r}",
                fix="pass json.loads(graph.capture(loss).to_json())",
            )
    parts = {
        "@TITLE@": escape(title),
        "@STYLE@": "\n".join(_asset(f"assets/{name}.css") for name in _STYLES),
        "@LAYOUT@": _asset("vendor/dagre.min.js"),
        "@LICENCE@": _asset("vendor/dagre.LICENSE.txt").replace("--", "- -"),
        "@SCRIPT@": "\n".join(_asset(f"assets/{name}.js") for name in _SCRIPTS),
        "@DATA@": _data(title, graph, other, sections),  # last: what is in it is not looked at again
    }
    page = _asset("assets/page.html")
    for key, part in parts.items():
        page = page.replace(key, part, 1)
    return page


def _data(title: str, graph: Json | None, other: Json | None, sections: Sequence[PageSection]) -> str:
    try:
        shown = [to_data(section) for section in sections]
        data = {"title": title, "graph": graph, "other": other, "sections": shown}
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ViewerError(
            "the data of a report must be what JSON can hold",
            got=str(error),
            fix="pass finite numbers, text and lists, as the sections say",
        ) from None
    # "<" is the one character that could end the element or open another; JSON may write it as an escape.
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
