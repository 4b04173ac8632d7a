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
from sternway.atlas.pages._blocks import slug

# A code span may contain what looks like a link, so spans are matched first.
_MARKDOWN = re.compile(r"(?<![\\`])(`+)(?!`).+?(?<!`)\1(?!`)|(?<!\\)\]\(([^()\s#]*)(?:#([^()\s]*))?\)")
_HTML = re.compile(r'<a href="?([^" >#]*)(?:#([^" >]*))?')
_HEAD = re.compile(r'<(?:link|script)\b[^<>]*?\b(?:href|src)="([^"]+)"')
_ID = re.compile(r'<(?:section|h[234]|code) id="?([^" >]+)')
_BASE = re.compile(r'<base href="([^"]+)">')
_FENCE = re.compile(r"(?m)^(?:> )?(`{3,})[^\n]*\n.*?^(?:> )?\1$", re.DOTALL)  # in a quoted note too
_TITLE = re.compile(r"(?m)^## (.+)$")
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
    if kind == "source":
        return file_page(path, "_source.html")
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
        if base := _BASE.search(text, 0, 2000):  # where links of a keyword page start
            found = {(path or base[1], anchor) for path, anchor in found}
    else:
        plain = _FENCE.sub("", text) if "```" in text else text
        rows = _MARKDOWN.findall(plain)
        anchors = tuple(sorted({slug(title) for title in _TITLE.findall(plain)}))
        found = {(path, anchor) for ticks, path, anchor in rows if not ticks}
    anchors_of: dict[str, list[str]] = {}
    for path, anchor in found:
        anchors_of.setdefault(path, []).append(anchor)
    folder = posixpath.dirname(page)
    targets = []
    for path, wanted in sorted(anchors_of.items()):
        whole = path  # an address: only source files on a code host can be checked
        if "://" not in path:
            whole = posixpath.normpath(posixpath.join(folder, path)) if path else page
        numbers = [int(anchor[1:]) for anchor in wanted if anchor[:1] == "L" and anchor[1:].isdigit()]
        if "://" in path and not numbers:
            continue
        others = []
        if len(numbers) < len(wanted):
            others = sorted(one for one in wanted if one and not (one[0] == "L" and one[1:].isdigit()))
        targets.append((whole, max(numbers, default=0), tuple(others)))
    return Links(lines, anchors, tuple(targets))


def check(
    pages: Mapping[str, Links], others: Iterable[str] = (), sources: Mapping[str, int] | None = None
) -> list[BrokenLink]:
    """Every link without a target.

    Args:
        pages: the links of each page.
        others: files that may be linked to and have no links of their own.
        sources: source files as Markdown links name them, and their number of lines.
    """
    there = {*pages, *others}
    known_lines = sources or {}
    anchors_of = {page: frozenset(links.anchors) for page, links in pages.items()}
    broken = []
    for page, links in sorted(pages.items()):
        for path, line, anchors in links.targets:
            if path in known_lines:
                if line > known_lines[path]:
                    broken.append(BrokenLink(page, f"{path}#L{line}"))
                continue
            if "://" in path:
                continue
            if path not in there:
                broken.append(BrokenLink(page, path))
                continue
            target = pages.get(path)
            if line > (target.lines if target else 0):
                broken.append(BrokenLink(page, f"{path}#L{line}"))
            known = anchors_of.get(path, frozenset())
            broken += [BrokenLink(page, f"{path}#{anchor}") for anchor in anchors if anchor not in known]
    return broken
