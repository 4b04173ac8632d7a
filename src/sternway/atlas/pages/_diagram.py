"""A diagram of boxes in columns: as SVG for HTML pages, as Mermaid for Markdown, which code hosts draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from sternway.atlas.pages._blocks import At, Box, Diagram, Ref, To

Link = Callable[[At | To | Ref], str]

_ROW, _BOX, _GAP, _CHARACTER = 34, 24, 56, 7.3  # pixels
_LONGEST = 34  # characters in a box


def shortened(text: str) -> str:
    """The end of a long path is what tells it apart."""
    return text if len(text) <= _LONGEST else "…" + text[1 - _LONGEST :]


def svg(diagram: Diagram, link: Link) -> str:
    """The diagram as an inline SVG element; boxes with a target are links."""
    columns: dict[int, list[int]] = {}
    for number, box in enumerate(diagram.boxes):
        columns.setdefault(box.column, []).append(number)
    height = _ROW * max(map(len, columns.values())) + 8
    places: dict[int, tuple[float, float, float]] = {}  # left, middle, width
    left = 2.0
    for column in sorted(columns):
        members = columns[column]
        width = max(_CHARACTER * len(shortened(diagram.boxes[number].text)) + 18 for number in members)
        top = (height - _ROW * len(members)) / 2
        for row, number in enumerate(members):
            places[number] = (left, top + _ROW * row + _ROW / 2, width)
        left += width + _GAP
    total = left - _GAP + 2
    head = (
        f'<svg class="diagram" role="img" aria-label="{escape(diagram.title)}" width="{total:.0f}" height="{height}" '
        f'viewBox="0 0 {total:.0f} {height}">'
    )
    parts = [head]
    if diagram.arrows:
        parts.append(f'<path d="{"".join(_arrow(places[start], places[end]) for start, end in diagram.arrows)}"/>')
    parts += [_box(box, places[number], link) for number, box in enumerate(diagram.boxes)]
    return "".join([*parts, "</svg>"])


def _arrow(start: tuple[float, float, float], end: tuple[float, float, float]) -> str:
    from_x, from_y = start[0] + start[2], start[1]
    to_x, to_y = end[0], end[1]
    if to_x <= start[0]:  # to the same column, or back: round the right side
        to_x = end[0] + end[2]
        bend = max(from_x, to_x) + 26
        return _path(
            f"M{from_x:.0f} {from_y:.0f}C{bend:.0f} {from_y:.0f} {bend:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}",
            to_x,
            to_y,
            -1,
        )
    middle = (from_x + to_x) / 2
    curve = f"M{from_x:.0f} {from_y:.0f}C{middle:.0f} {from_y:.0f} {middle:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}"
    return _path(curve, to_x, to_y, 1)


def _path(curve: str, x: float, y: float, way: int) -> str:
    back = x - 6 * way
    return f"{curve}M{back:.0f} {y - 4:.0f}L{x:.0f} {y:.0f} {back:.0f} {y + 4:.0f}"


def _box(box: Box, place: tuple[float, float, float], link: Link) -> str:
    left, middle, width = place
    kind = " class=subject" if box.is_subject else ""
    body = (
        f"<rect{kind} x={left:.0f} y={middle - _BOX / 2:.0f} width={width:.0f} />"
        f"<text x={left + width / 2:.0f} y={middle + 4:.0f}>{escape(shortened(box.text))}</text>"
    )
    if box.target is None:
        return body
    title = f"<title>{escape(box.text)}</title>" if shortened(box.text) != box.text else ""
    return f"<a href={link(box.target)}>{title}{body}</a>"


def mermaid(diagram: Diagram) -> Iterator[str]:
    """The lines of the same diagram in Mermaid's language."""
    yield "graph LR"
    for number, box in enumerate(diagram.boxes):
        text = box.text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
        yield f'  n{number}["{text}"]'
    for start, end in diagram.arrows:
        yield f"  n{start} --> n{end}"
