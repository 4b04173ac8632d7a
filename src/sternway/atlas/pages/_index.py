"""Keyword pages: of one file, every identifier and word with its lines and sections; of a folder, every definition.

These may have very many rows, so they are written as strings rather than made of blocks. An index of more than
``LARGEST`` bytes is several pages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from html import escape as html_escape
from typing import NamedTuple

from sternway.atlas._paths import anchor_of, file_page, folder_page, link, shown, source_link
from sternway.atlas._records import Keyword
from sternway.atlas.pages._blocks import Page, slug
from sternway.atlas.pages._html import index_html
from sternway.atlas.pages._links import page_of
from sternway.atlas.pages._markdown import code, escape

LARGEST = 240_000  # bytes of rows on one page; with the frame around them, pages stay below 300,000
_PLAIN = frozenset(("name", "word"))  # kinds that go without saying
_DEFINED = frozenset(("class", "function", "method", "struct", "enum", "interface", "key"))
_PLACES = 8  # of one name, in the index of a folder


class IndexRow(NamedTuple):
    """One row of an index: the letter it stands under, as Markdown and as HTML."""

    name: str
    markdown: str
    html: str


class IndexEntry(NamedTuple):
    """A definition below a folder."""

    tail: str
    name: str  # dotted within its file
    kind: str
    path: str
    line: int


@functools.lru_cache(maxsize=1 << 16)
def letter(name: str) -> str:
    first = name.lstrip("_")[:1].lower()
    return first if "a" <= first <= "z" else "0-9" if first.isdigit() else "other"


def _order(name: str) -> tuple[bool, str]:
    found = letter(name)
    return found == "other", found


# -- one file


def file_rows(path: str, keywords: list[Keyword], sections: dict[str, list[int]], base: str) -> Iterator[IndexRow]:
    """A row for each keyword: its kind, its lines (the defining one is marked), and the sections that have it.

    Only one line is a link: pages with all of them would be several times as large.
    """
    source = source_link(page_of("kw", path, ".md"), base, path)
    for word in sorted(keywords, key=lambda word: _order(word.name)):
        found = "".join(f" §{number}" for number in sections.get(word.name, ()))
        uses = "".join(f" {line}" for line in word.uses)
        kind = "" if word.kind in _PLAIN else f" {word.kind}"
        line = f"[{word.line}]({source}#L{word.line})" if word.kind in _DEFINED else f"**{word.line}**"
        text = f"- {code(word.name)}{kind}{f' {line}' if word.line else ''}{uses}{found}"
        first = word.line or word.uses[0]
        link_first = f"<a href=#L{first}>{first}</a>"
        places = f"<b>{link_first}</b>{uses}" if word.line else link_first + uses.removeprefix(f" {first}")
        tail = f"<s>{found.strip()}</s>" if found else ""
        small = f"<small>{word.kind}</small>" if kind else ""
        name = f"<dt>{html_escape(word.name)}{small}{tail}<dd>{places}"
        yield IndexRow(word.name, text, name)


def file_heads(path: str, titles: Sequence[str], base: str) -> tuple[str, str]:
    """What a file's keyword page opens with, as Markdown and HTML: file, documentation, folder, sections."""
    page, html_page = page_of("kw", path, ".md"), page_of("kw", path, ".html")
    folder = path.rpartition("/")[0]
    docs, html_docs = link(page, page_of("docs", path, ".md")), link(html_page, page_of("docs", path, ".html"))
    numbered = [(number, title, slug(title)) for number, title in enumerate(titles, 1)]
    name, parent = shown(path), shown(folder) or "the top folder"
    lines = [
        "|  |  |",
        "| --- | --- |",
        f"| Original file | [{escape(name)}]({source_link(page, base, path)}) |",
        f"| Documentation | [{escape(name.rpartition('/')[2])}]({docs}) |",
        f"| Folder | [{escape(parent)}]({link(page, page_of('index', folder, '.md'))}) |",
        f"| Sections | {', '.join(f'§{number} [{title}]({docs}#{anchor})' for number, title, anchor in numbered)} |",
    ]
    chosen = ", ".join(f'§{number} <a href="{html_docs}#{anchor}">{title}</a>' for number, title, anchor in numbered)
    rows = (
        ("Original file", f'<a href="{link(html_page, page_of("source", path, ".html"))}">{html_escape(name)}</a>'),
        ("Documentation", f'<a href="{html_docs}">{html_escape(name.rpartition("/")[2])}</a>'),
        ("Folder", f'<a href="{link(html_page, page_of("index", folder, ".html"))}">{html_escape(parent)}</a>'),
        ("Sections", chosen),
    )
    body = "".join(f"<tr><td>{left}</td><td>{right}</td></tr>" for left, right in rows)
    return "\n".join(lines), f'<div class="wide"><table><tbody>{body}</tbody></table></div>'


# -- a folder


def folder_rows(folder: str, entries: Iterable[IndexEntry], base: str) -> Iterator[IndexRow]:
    """A row for each name that is defined below a folder."""
    page, html_page = folder_page(folder, "sub.md"), folder_page(folder, "sub.html")
    groups: dict[tuple[str, str], list[IndexEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.tail, entry.kind), []).append(entry)
    for (tail, kind), found in sorted(
        groups.items(), key=lambda pair: (*_order(pair[0][0]), pair[0][0].casefold(), pair[0])
    ):
        links, html_links = [], []
        for entry in found[:_PLACES]:
            where = f"{shown(entry.path[len(folder) + 1 if folder else 0 :])}:{entry.line}"
            links.append(f"[{escape(where)}]({source_link(page, base, entry.path)}#L{entry.line})")
            target = f"{link(html_page, file_page(entry.path, '_docs.html'))}#{anchor_of(entry.name)}"
            html_links.append(f"<a href={target}>{html_escape(where)}</a>")
        more = f" ({_PLACES} of {len(found):,})" if len(found) > _PLACES else ""
        html = f"<dt>{html_escape(tail)}<small>{kind}</small><dd>{', '.join(html_links)}{more}"
        yield IndexRow(tail, f"- {code(tail)} {kind} {', '.join(links)}{more}", html)


def folder_heads(folder: str, below: str) -> tuple[str, str]:
    """What the index of a folder says in place of rows, if all its files are in one folder below it."""
    page, html_page = folder_page(folder, "sub.md"), folder_page(folder, "sub.html")
    said, name = "All definitions are below", shown(below)
    target, html_target = page_of("sub", below, ".md"), page_of("sub", below, ".html")
    return (
        f"{said} [{escape(name)}]({link(page, target)}).",
        f"<p>{said} <a href={link(html_page, html_target)}>{html_escape(name)}</a>.</p>",
    )


# -- pages


def write_index(
    page: Page, tree: str, rows: Iterable[IndexRow], heads: tuple[str, str] = ("", ""), base: str = ""
) -> Iterator[tuple[str, str]]:
    """The pages of an index: output path and text. The first names the others, if there are any."""
    parts = list(_parts(rows))
    names = [page.name if not number else f"{page.name}.{number + 1}" for number in range(len(parts))]
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        title = page.title if not number else f"{page.title}: part {number + 1}"
        lead, html_lead = heads if not number else ("", "")
        others = [(index, other) for index, other in enumerate(names) if len(names) > 1 and index != number]
        if others:
            lead += "\n\n" + ", ".join(
                f"[{_span(parts[i])}]({link(f'{name}.md', f'{other}.md')})" for i, other in others
            )
            html_lead += (
                "<p>"
                + ", ".join(
                    f'<a href="{link(f"{name}.html", f"{other}.html")}">{_span(parts[i])}</a>' for i, other in others
                )
                + "</p>"
            )
        yield (
            f"{name}.md",
            "\n".join([f"# {escape(title)}", "", *([lead, ""] if lead.strip() else []), *_markdown(part)]),
        )
        made = Page(name, page.path, title, (), page.is_file)
        yield f"{name}.html", index_html(made, tree, html_lead + _html(part), base)


def _parts(rows: Iterable[IndexRow]) -> Iterator[list[IndexRow]]:
    part: list[IndexRow] = []
    size, made = 0, False
    for row in rows:
        length = max(len(row.markdown.encode()), len(row.html.encode()))
        if part and size + length > LARGEST:
            yield part
            part, size, made = [], 0, True
        part.append(row)
        size += length
    if part or not made:
        yield part


def _span(part: list[IndexRow]) -> str:
    first, last = letter(part[0].name), letter(part[-1].name)
    return first if first == last else f"{first} to {last}"


def _markdown(part: list[IndexRow]) -> Iterator[str]:
    before = ""
    for row in part:
        if (now := letter(row.name)) != before:
            yield from (*([""] if before else []), f"## {now}", "")
            before = now
        yield row.markdown
    yield ""


def _html(part: list[IndexRow]) -> str:
    pieces, before = [], ""
    for row in part:
        if (now := letter(row.name)) != before:
            pieces.append(f"{'</dl>' if before else ''}<h2>{now}</h2><dl>")
            before = now
        pieces.append(row.html)
    return "\n".join([*pieces, "</dl>" if before else ""])
