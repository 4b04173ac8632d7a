"""A page as Markdown. Text from the source is escaped; code fences are longer than any in the text.

Lines of the source are linked where a code host shows them: beside the pages, or below an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sternway.atlas._paths import shown, source_link
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Diagram,
    Emphasis,
    Fence,
    Fold,
    Heading,
    Inline,
    Items,
    Note,
    Page,
    Paragraph,
    Ref,
    Signature,
    Source,
    Strong,
    Table,
    To,
    Url,
    Words,
)
from sternway.atlas.pages._diagram import mermaid
from sternway.atlas.pages._links import relative

_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~#])")
_TICKS = re.compile(r"`+")


def to_markdown(page: Page, base: str, unlinked: str = "") -> str:
    """The whole page.

    Args:
        page: the page.
        base: where the source is, as ``source_link`` takes it.
        unlinked: a source file whose lines are named without links, which are most of a long page.
    """
    writer = MarkdownWriter(f"{page.name}.md", base, unlinked)
    parts = [f"# {escape(page.title)}", ""]
    for section in page.sections:
        if section.title:
            parts += [f"## {section.title}", ""]
        for block in section.blocks:
            parts += [*writer.block(block), ""]
    return "\n".join(parts)


def escape(text: str) -> str:
    """Escape words, so that Markdown shows them unchanged.

    Example:
        >>> escape("a_b <script>")
        'a\\\\_b \\\\<script\\\\>'
    """
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())) if text.strip() else text


def code(text: str) -> str:
    """A code span, with more backquotes than any in the text."""
    text = " ".join(text.split())
    if "`" not in text:
        return f"`{text}`" if text else ""
    ticks = "`" * (max(map(len, _TICKS.findall(text)), default=0) + 1)
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def fenced(text: str, lexer: str) -> Iterator[str]:
    """Code between fences that are longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    marks = "`" * (longest + 1)
    yield f"{marks}{lexer}"
    yield text.removesuffix("\n")
    yield marks


class MarkdownWriter:
    """Writes the blocks of one page."""

    def __init__(self, page: str, base: str, unlinked: str = "") -> None:
        self.page, self.base, self.unlinked = page, base, unlinked

    def block(self, block: Block) -> Iterator[str]:
        if isinstance(block, Paragraph):
            yield self.words(block.words)
        elif isinstance(block, Items):
            for number, item in enumerate(block.items, 1):
                yield f"{f'{number}.' if block.ordered else '-'} {self.words(item)}"
        elif isinstance(block, Table):
            yield f"| {' | '.join(block.head)} |"
            yield f"|{' --- |' * len(block.head)}"
            for row in block.rows:
                yield f"| {' | '.join(self.words(cell, in_table=True) for cell in row)} |"
        elif isinstance(block, Heading):
            yield f"{'#' * block.level} {block.kind} {code(block.name)}"
        elif isinstance(block, Fence | Signature | Source):
            yield from fenced(block.text, block.lexer)
        elif isinstance(block, Diagram):
            yield from fenced("\n".join(mermaid(block)), "mermaid")
        else:
            yield from self._inside(block)

    def _inside(self, block: Note | Fold) -> Iterator[str]:
        inner = [line for one in block.blocks for line in (*self.block(one), "")]
        if isinstance(block, Note):
            yield f"> **{escape(block.title)}**"
            yield ">"
            yield from (f"> {line}".rstrip() for text in inner[:-1] for line in text.split("\n"))
        else:
            yield f"<details><summary>{escape(block.title)}</summary>"
            yield ""
            yield from inner
            yield "</details>"

    def words(self, words: Words, *, in_table: bool = False) -> str:
        return "".join(self._inline(item, in_table) for item in words)

    def _inline(self, item: Inline, in_table: bool) -> str:
        if isinstance(item, str):
            lead = " " if item[:1] == " " else ""
            tail = " " if item[-1:] == " " and len(item) > 1 else ""
            return f"{lead}{escape(item)}{tail}" if item.strip() else item
        if isinstance(item, Code):
            return self._code(item.text, in_table)
        if isinstance(item, Strong):
            return f"**{escape(item.text)}**"
        if isinstance(item, Emphasis):
            return f"*{escape(item.text)}*"
        if isinstance(item, At):
            label = escape(item.text or f"{shown(item.path)}:{item.line}")
            return label if item.path == self.unlinked else f"[{label}]({self.source(item.path, item.line)})"
        if isinstance(item, Ref):
            name = self._code(item.text, in_table)
            return name if item.path == self.unlinked else f"[{name}]({self.source(item.path, item.line)})"
        if isinstance(item, Url):
            return f"[{escape(item.text)}]({item.address})"
        return f"[{escape(item.text)}]({self.to(item)})"

    def _code(self, text: str, in_table: bool) -> str:
        return code(text).replace("|", "\\|") if in_table else code(text)

    def to(self, item: To) -> str:
        if item.kind == "source":
            return source_link(self.page, self.base, item.path)
        return relative(self.page, item.kind, item.path, ".md")

    def source(self, path: str, line: int) -> str:
        return f"{source_link(self.page, self.base, path)}#L{line}"
