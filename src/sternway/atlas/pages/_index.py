"""Keyword indexes, grouped by letter: of one file with every line, of a folder with its files.

There may be millions of links, so these pages are written as strings rather than made of blocks.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape as html_escape
from typing import NamedTuple, TypeAlias, TypeVar

from sternway.atlas._paths import link, shown
from sternway.atlas._records import Keyword
from sternway.atlas.pages._blocks import slug
from sternway.atlas.pages._links import page_of
from sternway.atlas.pages._markdown import code, escape

SPLIT_ABOVE = 6000  # entries; a larger index is one page for each letter
_ONLY_USED = frozenset(("name", "import", "parameter"))
_DEFINITIONS, _USES = 12, 8  # of each name, in the index of a subtree


Where: TypeAlias = tuple[str, int, str]  # path, line, kind; a plain tuple, since there are millions


class Entry(NamedTuple):
    """A name, where it is defined, and where it is only used."""

    name: str
    defined: tuple[Where, ...]
    used: tuple[Where, ...]


_Named = TypeVar("_Named", Keyword, Entry)


def _letter(name: str) -> str:
    first = name.lstrip("_")[:1].lower()
    return first if "a" <= first <= "z" else "0-9" if first.isdigit() else "other"


def by_letter(words: Iterable[_Named]) -> dict[str, list[_Named]]:
    """Keywords or entries, grouped by their first letter."""
    groups: dict[str, list[_Named]] = defaultdict(list)
    for word in words:
        groups[_letter(word.name)].append(word)
    return {letter: groups[letter] for letter in sorted(groups, key=lambda one: (one == "other", one))}


# -- one file


def file_markdown(path: str, keywords: list[Keyword]) -> str:
    """Every keyword of a file: the defining line first, then uses."""
    target = link(page_of("kw", path, ".md"), page_of("docs", path, ".html"))
    about = link(page_of("kw", path, ".md"), page_of("docs", path, ".md"))
    lines = [f"# Keywords of {escape(shown(path))}", "", f"[About this file]({about})", ""]
    for letter, group in by_letter(keywords).items():
        lines += [f"## {letter}", ""]
        for word in group:
            uses = " ".join([f"[{line}]({target}#L{line})" for line in word.uses])
            defined = f" defined at [{word.line}]({target}#L{word.line})" if word.line else ""
            lines.append(f"- {code(word.name)} {word.kind}{defined}{' used at ' + uses if uses else ''}")
        lines.append("")
    return "\n".join(lines)


def file_html(path: str, keywords: list[Keyword]) -> str:
    """The same as the body of an HTML page."""
    target = link(page_of("kw", path, ".html"), page_of("docs", path, ".html"))
    parts = []
    for letter, group in by_letter(keywords).items():
        parts.append(f"<h2 id={slug(letter)}>{letter}</h2><dl>")
        for word in group:
            places = (word.line, *word.uses) if word.line else word.uses
            links = " ".join([f"<a href={target}#L{line}>{line}</a>" for line in places])
            mark = " class=defined" if word.line else ""
            parts.append(f"<dt>{html_escape(word.name)}<small>{word.kind}</small><dd{mark}>{links}")
        parts.append("</dl>")
    return "\n".join(parts)


# -- a subtree


def merge(files: Iterable[tuple[str, Iterable[tuple[str, str, int]]]]) -> list[Entry]:
    """One entry for each name of all files; a word and an identifier of the same spelling get one each."""
    defined: dict[str, list[Where]] = defaultdict(list)
    used: dict[str, list[Where]] = defaultdict(list)
    words: dict[str, list[Where]] = defaultdict(list)
    for path, rows in files:
        for name, kind, line in rows:
            target = defined
            if kind == "word":
                target = words
            elif kind in _ONLY_USED:
                target = used
            target[name].append((path, line, kind))
    names = [Entry(name, tuple(defined.get(name, ())), tuple(used.get(name, ()))) for name in {*defined, *used}]
    names += [Entry(name, (), tuple(places)) for name, places in words.items()]
    return sorted(names, key=lambda entry: (entry.name.casefold(), entry))


def subtree_markdown(page: str, title: str, letters: dict[str, list[Entry]]) -> str:
    lines = [f"# {escape(title)}", ""]
    for letter, entries in letters.items():
        lines += [f"## {letter}", ""]
        lines += [_markdown_entry(page, entry) for entry in entries]
        lines.append("")
    return "\n".join(lines)


def _markdown_entry(page: str, entry: Entry) -> str:
    kind = entry.defined[0][2] if entry.defined else entry.used[0][2]
    text = f"- {code(entry.name)} {kind}"
    if entry.defined:
        text += f" defined at {_cut(list(_links(page, entry.defined[:_DEFINITIONS])), len(entry.defined))}"
    if entry.used:
        files = _cut(list(_links(page, entry.used[:_USES])), len(entry.used))
        text += f" used in {files}"
    return text


def _links(page: str, places: Iterable[Where]) -> Iterator[str]:
    for path, line, _ in places:
        label, target = _target(page, path)
        yield f"[{label}:{line}]({target}#L{line})"


def _cut(parts: list[str], total: int) -> str:
    return ", ".join(parts) + (f" ({len(parts)} of {total:,})" if len(parts) < total else "")


@functools.lru_cache(maxsize=1 << 16)
def _target(page: str, path: str) -> tuple[str, str]:
    return escape(shown(path)), link(page, page_of("docs", path, ".html"))


def subtree_html(page: str, letters: dict[str, list[Entry]]) -> str:
    parts = []
    for letter, entries in letters.items():
        parts.append(f"<h2 id={slug(letter)}>{letter}</h2><dl>")
        for entry in entries:
            kind = entry.defined[0][2] if entry.defined else entry.used[0][2]
            parts.append(f"<dt>{html_escape(entry.name)}<small>{kind}</small>")
            if entry.defined:
                links = list(_html_links(page, entry.defined[:_DEFINITIONS]))
                parts.append(f"<dd>defined at {_cut(links, len(entry.defined))}")
            if entry.used:
                parts.append(f"<dd>used in {_cut(list(_html_links(page, entry.used[:_USES])), len(entry.used))}")
        parts.append("</dl>")
    return "\n".join(parts)


def _html_links(page: str, places: Iterable[Where]) -> Iterator[str]:
    for path, line, _ in places:
        label, target = _html_target(page, path)
        yield f"<a href={target}#L{line}>{label}:{line}</a>"


@functools.lru_cache(maxsize=1 << 16)
def _html_target(page: str, path: str) -> tuple[str, str]:
    return html_escape(shown(path)), link(page, page_of("docs", path, ".html"))
