"""Links between pages, and the check that every link has a target.

The links of a page are read back from its finished text, so that a mistake of a renderer is found too. A link to a line
is good if the target page has that line.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sternway.atlas._paths import file_page, folder_page, link

# A code span may contain what looks like a link, so spans are matched first.
_MARKDOWN = re.compile(r"(?<![\\`])(`+)(?!`).+?(?<!`)\1(?!`)|(?<!\\)\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
_HTML = re.compile(r'<a (?:class="at" )?href="?([^" >#]*)(?:#([^" >]*))?')
_HEAD = re.compile(r'<(?:link|script)\b[^<>]*?\b(?:href|src)="([^"]+)"')
_ID = re.compile(r'<(?:section|h2) id="?([^" >]+)')
_FENCE = re.compile(r"(?m)^(`{3,})[^\n]*\n.*?^\1$", re.DOTALL)
_SOURCE = '<pre class="source">'


class Links(NamedTuple):
    """A page's anchors and its links; of line numbers only the largest is kept, which implies the others."""

    lines: int  # anchors L1 to this
    anchors: tuple[str, ...]
    targets: tuple[tuple[str, int, tuple[str, ...]], ...]  # page, largest line, other anchors


class BrokenLink(NamedTuple):
    page: str
    target: str


@functools.lru_cache(maxsize=1 << 16)
def page_of(kind: str, path: str, suffix: str) -> str:
    """The page that ``To(kind, path)`` means."""
    if kind.startswith("_site/"):
        return f"{kind}.html"
    if kind in ("docs", "kw"):
        return file_page(path, f"_{kind}{suffix}")
    return folder_page(path, f"{kind}{suffix}")


@functools.lru_cache(maxsize=1 << 16)
def relative(page: str, kind: str, path: str, suffix: str) -> str:
    return link(page, page_of(kind, path, suffix))


def read_links(page: str, text: str) -> Links:
    """The anchors and links in the text of a finished page."""
    lines = 0
    anchors: tuple[str, ...] = ()
    if page.endswith(".html"):
        lines = text.count("<i id=L")
        if lines:
            start = text.index(_SOURCE)
            text = text[:start] + text[text.index("</pre>", start) :]
        found = {*_HTML.findall(text), *((target, "") for target in _HEAD.findall(text, 0, text.find("</head>")))}
        anchors = tuple(sorted(set(_ID.findall(text))))
    else:
        rows = _MARKDOWN.findall(_FENCE.sub("", text) if "\n```" in text else text)
        found = {(path, anchor) for ticks, path, anchor in rows if not ticks}
    anchors_of: dict[str, list[str]] = {}
    for path, anchor in found:
        anchors_of.setdefault(path, []).append(anchor)
    folder = posixpath.dirname(page)
    targets = []
    for path, wanted in sorted(anchors_of.items()):
        if "://" not in path:
            whole = posixpath.normpath(posixpath.join(folder, path)) if path else page
            numbers = [int(anchor[1:]) for anchor in wanted if anchor[:1] == "L" and anchor[1:].isdigit()]
            others = []
            if len(numbers) < len(wanted):
                others = sorted(one for one in wanted if one and not (one[0] == "L" and one[1:].isdigit()))
            targets.append((whole, max(numbers, default=0), tuple(others)))
    return Links(lines, anchors, tuple(targets))


def check(pages: Mapping[str, Links], others: Iterable[str] = ()) -> list[BrokenLink]:
    """Every link without a target. ``others``: files that may be linked to and have no links of their own."""
    there = {*pages, *others}
    broken = []
    for page, links in sorted(pages.items()):
        for path, line, anchors in links.targets:
            if path not in there:
                broken.append(BrokenLink(page, path))
                continue
            target = pages.get(path)
            if line > (target.lines if target else 0):
                broken.append(BrokenLink(page, f"{path}#L{line}"))
            known = target.anchors if target else ()
            broken += [BrokenLink(page, f"{path}#{anchor}") for anchor in anchors if anchor not in known]
    return broken
