"""A page before it is written: sections of paragraphs, lists, tables and diagrams, made of words, code and links.

Markdown and HTML are both written from these, so they have the same content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias


class Code(NamedTuple):
    text: str
    anchor: str = ""  # the definition that this is the place of


class Strong(NamedTuple):
    text: str


class Emphasis(NamedTuple):
    text: str


class At(NamedTuple):
    """A link to a line of a source file."""

    path: str
    line: int
    text: str = ""  # if not "path:line"


class To(NamedTuple):
    """A link to a page of a file ("docs", "kw", "source"), a folder ("index", "doc", "sub") or the tree ("reading")."""

    kind: str
    path: str
    text: str


class Ref(NamedTuple):
    """A name, linked to its definition."""

    text: str
    path: str
    name: str
    line: int


class Url(NamedTuple):
    """A link to the web, from a docstring."""

    address: str
    text: str


Inline: TypeAlias = str | Code | Strong | Emphasis | At | To | Ref | Url
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


class Fence(NamedTuple):
    """A piece of code."""

    text: str
    lexer: str = ""


class Signature(NamedTuple):
    """The first lines of a definition; the names in ``links`` lead to their own."""

    text: str
    lexer: str
    links: tuple[Ref, ...] = ()


class Heading(NamedTuple):
    """A definition's heading; ``level`` 3 is a section's first."""

    level: int
    name: str
    kind: str
    anchor: str = ""


class Note(NamedTuple):
    title: str
    blocks: tuple[Block, ...]


class Fold(NamedTuple):
    """Blocks that are shown on demand."""

    title: str
    blocks: tuple[Block, ...]


class Box(NamedTuple):
    """A box of a diagram: its text, its column, and where it leads."""

    text: str
    column: int
    target: At | To | Ref | None = None
    is_subject: bool = False


class Diagram(NamedTuple):
    """Boxes and arrows between them, by number."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]


Block: TypeAlias = Paragraph | Items | Table | Source | Fence | Signature | Heading | Note | Fold | Diagram


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


def folded(title: str, block: Block | None, rows: int, most: int) -> Block | None:
    """The block, folded away if it has more rows than ``most``."""
    return Fold(title, (block,)) if block is not None and rows > most else block


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
