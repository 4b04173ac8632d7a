"""A page before it is written: sections of paragraphs, lists and tables, made of words, code and links.

Markdown and HTML are both written from these, so they have the same content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Code(NamedTuple):
    text: str


class At(NamedTuple):
    """A link to a line of a source file."""

    path: str
    line: int
    text: str = ""  # if not "path:line"


class To(NamedTuple):
    """A link to a page of a file ("docs", "kw"), a folder ("index", "doc", "sub") or the tree ("reading", "search")."""

    kind: str
    path: str
    text: str


Inline: TypeAlias = str | Code | At | To
Words: TypeAlias = tuple[Inline, ...]


class Paragraph(NamedTuple):
    words: Words


class Items(NamedTuple):
    items: tuple[Words, ...]
    ordered: bool = False


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: tuple[tuple[Words, ...], ...]


class Source(NamedTuple):
    """A file's text, with a line anchor for each line."""

    text: str
    lexer: str


Block: TypeAlias = Paragraph | Items | Table | Source


class Section(NamedTuple):
    title: str
    blocks: tuple[Block, ...]


class Page(NamedTuple):
    """``name`` is the output path without its suffix; ``path`` the source file or folder."""

    name: str
    path: str
    title: str
    sections: tuple[Section, ...]
    is_file: bool = False


_QUOTED = re.compile(r"``([^`]+)``|`([^`\n]+)`")


def prose(text: str) -> Words:
    """A docstring's words, with what is in backquotes as code.

    Example:
        >>> prose("Calls ``run`` once.")
        ('Calls ', Code(text='run'), ' once.')
    """
    words: list[Inline] = []
    end = 0
    for match in _QUOTED.finditer(text):
        words += [text[end : match.start()], Code(match[1] or match[2])]
        end = match.end()
    return tuple(word for word in (*words, text[end:]) if word)


def sentence(*words: Inline) -> Paragraph:
    return Paragraph(tuple(words))


def joined(parts: Iterable[Words], between: str = ", ") -> Words:
    """Join several runs of words."""
    found: list[Inline] = []
    for part in parts:
        if found:
            found.append(between)
        found += part
    return tuple(found)


def cut(parts: Sequence[Words], most: int, between: str = ", ") -> Words:
    """Join at most ``most`` runs of words, followed by "(N of M)" if some are left out."""
    words = joined(parts[:most], between)
    return words if len(parts) <= most else (*words, f" ({most} of {len(parts):,})")


def section(title: str, *blocks: Block | None) -> Section | None:
    """A section of the blocks that are not empty; None if all are."""
    kept = tuple(block for block in blocks if block is not None and any(block))
    return Section(title, kept) if kept else None


def sections(*found: Section | None) -> tuple[Section, ...]:
    return tuple(item for item in found if item is not None)


def table(head: Sequence[str], rows: Iterable[tuple[Words, ...]]) -> Table | None:
    """A table without the columns that are empty in every row; None without rows."""
    kept = list(rows)
    if not kept:
        return None
    used = [index for index in range(len(head)) if any(row[index] and any(row[index]) for row in kept)]
    return Table(tuple(head[index] for index in used), tuple(tuple(row[index] for index in used) for row in kept))


def slug(title: str) -> str:
    return "-".join("".join(char if char.isalnum() else " " for char in title.lower()).split())
