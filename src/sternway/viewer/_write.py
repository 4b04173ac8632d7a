"""Puts data, styles and scripts into one page. The page asks no network for anything, and is told not to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sternway.errors import ViewerError

_HERE = Path(__file__).parent
_SCRIPTS = ("tree.js", "picture.js", "table.js", "graph.js", "timeline.js", "main.js")
_EVENT = ("rank", "label", "op", "start", "end")

Json = Mapping[str, Any]


def write(
    path: str | Path,
    *,
    title: str,
    graph: Json | None = None,
    other: Json | None = None,
    timelines: Json | None = None,
    curves: Json | Sequence[Json] | None = None,
) -> Path:
    """Write a report to ``path`` and return it.

    Example:
        >>> import tempfile
        >>> curves = {"series": [{"name": "ours", "points": [[0, 2.3], [1, 1.9]]}]}
        >>> write(tempfile.mktemp(".html"), title="Loss", curves=curves).exists()
        True

    Args:
        title: shown at the top.
        graph: a graph as ``sternway.graph`` exports it (docs/graph_json.md).
        other: a second graph: the report shows what changed from ``graph`` to it.
        timelines: ``{"ranks": 2, "series": [{"name": "planned", "events": [{"rank": 0, "label": "2F0", "op": "F",
            "microbatch": 0, "stage": 2, "start": 0.0, "end": 1.0}, …]}, …]}``, the series one below the other; "unit"
            is put behind times.
        curves: ``{"name": "Loss", "x": "step", "y": "loss", "series": [{"name": "ours", "points": [[0, 2.3], …]},
            …]}``, or several such charts.

    Raises:
        ViewerError: nothing to show, or data of another shape.
    """
    ViewerError.unless(
        isinstance(path, str | Path) and str(path) != "", "a report must have a path", path, 'pass "report.html"'
    )
    path = Path(path)
    page = render(title=title, graph=graph, other=other, timelines=timelines, curves=curves)
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
    timelines: Json | None = None,
    curves: Json | Sequence[Json] | None = None,
) -> str:
    """The page as text; ``write`` says what goes in."""
    ViewerError.unless(isinstance(title, str), "title must be text", title, 'pass title="…"')
    charts: list[Any] = list(curves) if isinstance(curves, list | tuple) else [] if curves is None else [curves]
    if graph is None and timelines is None and not charts:
        raise ViewerError("a report must show something", got="no data", fix="pass graph=, timelines= or curves=")
    given: list[tuple[str, Any]] = [("graph", graph), ("other", other), ("timelines", timelines)]
    given = [(name, value) for name, value in given if value is not None]
    for name, value in given + [("curves", chart) for chart in charts]:
        ViewerError.unless(isinstance(value, Mapping), f"{name} must be a dict", value, "see viewer.write")
    for name, value in (("graph", graph), ("other", other)):
        if value is not None and value.get("format") != "sternway.graph":
            raise ViewerError(
                f"{name} must be a graph as sternway.graph exports it",
                got=f"format {value.get('format')!r}",
                fix="pass json.loads(graph.capture(loss).to_json())",
            )
    _check_series("timelines", timelines)
    for chart in charts:
        _check_series("curves", chart)
    for series in (timelines or {"series": []})["series"]:
        for event in series["events"]:
            ViewerError.unless(
                isinstance(event, Mapping), "an event of a timeline must be a dict", event, "see viewer.write"
            )
            if missing := [key for key in _EVENT if key not in event]:
                raise ViewerError(
                    f"an event of a timeline must have {', '.join(_EVENT)}",
                    got=f"one without {missing[0]}",
                    fix="add it",
                )
    data = {"title": title, "graph": graph, "other": other, "timelines": timelines, "curves": curves}
    # "<" is the one character that could end the element or open another; JSON may write it as an escape.
    try:
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
    except (TypeError, ValueError, RecursionError) as error:
        raise ViewerError(
            "the data of a report must be what JSON can hold", got=str(error), fix="pass numbers, text, lists, dicts"
        ) from None
    parts = {
        "@TITLE@": escape(title),
        "@STYLE@": _asset("assets/style.css"),
        "@LAYOUT@": _asset("vendor/dagre.min.js"),
        "@LICENCE@": _asset("vendor/dagre.LICENSE.txt").replace("--", "- -"),
        "@SCRIPT@": "\n".join(_asset(f"assets/{name}") for name in _SCRIPTS),
        "@DATA@": text,  # last: what is in it is not looked at again
    }
    page = _asset("assets/page.html")
    for key, part in parts.items():
        page = page.replace(key, part, 1)
    return page


def _check_series(name: str, value: Json | None) -> None:
    inner = "events" if name == "timelines" else "points"
    if value is not None and not (
        isinstance(value.get("series"), list)
        and all(isinstance(series, Mapping) and _has(series, inner) for series in value["series"])
    ):
        raise ViewerError(
            f"{name} must have series, each with a name and {inner}",
            got=f"keys {', '.join(map(str, value)) or 'none'}",
            fix=f'pass {{"series": [{{"name": …, "{inner}": […]}}]}}',
        )


def _has(series: Json, inner: str) -> bool:
    return "name" in series and isinstance(series.get(inner), list | tuple)


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
