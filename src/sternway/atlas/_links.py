"""Links: where each part of a page leads, and the check at the end that every one of them arrives.

What a page links to is read back from the finished text, not from what was meant, so that a mistake in a renderer is
found too. A line link is good if the page it leads to has that line.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sternway.atlas._names import file_page, folder_page, link

_MARKDOWN = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")
_SPAN = re.compile(r"(?<![\\`])(`+)(?!`).+?(?<!`)\1(?!`)")
_HTML = re.compile(r'(?:href|src)="?([^" >]+)')
_ID = re.compile(r' id="?([^" >]+)')
_FENCE = re.compile(r"(?m)^(`{3,})[^\n]*\n.*?^\1$", re.DOTALL)
_SOURCE = re.compile(r'<pre class="source">.*?</pre>', re.DOTALL)
_LINE = re.compile(r"L(\d+)$")


class Links(NamedTuple):
    """A page's anchors and what it links to; lines are kept as the largest, which implies the others."""

    lines: int  # anchors L1 to this
    anchors: tuple[str, ...]
    targets: tuple[tuple[str, int, tuple[str, ...]], ...]  # page, largest line, other anchors


class Broken(NamedTuple):
    page: str
    target: str


def page_of(kind: str, path: str, suffix: str) -> str:
    """The page that ``To(kind, path)`` means."""
    if kind in ("docs", "kw"):
        return file_page(path, f"_{kind}{suffix}")
    return folder_page(path, f"{kind}{suffix}")


def relative(page: str, kind: str, path: str, suffix: str) -> str:
    return link(page, page_of(kind, path, suffix))


def read_links(page: str, text: str) -> Links:
    """What a finished page links to, from its text."""
    lines = 0
    if page.endswith(".html"):
        lines = text.count("<i id=L")
        text = _SOURCE.sub("", text)
        found = {html.unescape(target) for target in _HTML.findall(text)}
        anchors = tuple(sorted(set(_ID.findall(text))))
    else:
        found = set(_MARKDOWN.findall(_SPAN.sub("", _FENCE.sub("", text))))
        anchors = ()
    folder = posixpath.dirname(page)
    largest: dict[str, int] = {}
    others: dict[str, set[str]] = {}
    for target in found:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        whole = posixpath.normpath(posixpath.join(folder, path)) if path else page
        line = _LINE.match(anchor)
        largest[whole] = max(largest.get(whole, 0), int(line[1]) if line else 0)
        if anchor and not line:
            others.setdefault(whole, set()).add(anchor)
    targets = tuple((path, most, tuple(sorted(others.get(path, ())))) for path, most in sorted(largest.items()))
    return Links(lines, anchors, targets)


def check(pages: Mapping[str, Links], others: Iterable[str] = ()) -> list[Broken]:
    """Every link that does not arrive. ``others``: files that may be linked to and have no links of their own."""
    there = {*pages, *others}
    broken = []
    for page, links in sorted(pages.items()):
        for path, line, anchors in links.targets:
            if path not in there:
                broken.append(Broken(page, path))
                continue
            target = pages.get(path)
            if line > (target.lines if target else 0):
                broken.append(Broken(page, f"{path}#L{line}"))
            known = target.anchors if target else ()
            broken += [Broken(page, f"{path}#{anchor}") for anchor in anchors if anchor not in known]
    return broken
