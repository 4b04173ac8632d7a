"""A page as Markdown. Text from the source is escaped; code fences are longer than any in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sternway.atlas._paths import shown
from sternway.atlas.pages._blocks import At, Block, Code, Inline, Items, Page, Paragraph, Source, Table, Words
from sternway.atlas.pages._links import relative

_SPECIAL = re.compile(r"([\\`*_\[\]<>|&~#])")
_TICKS = re.compile(r"`+")


def to_markdown(page: Page) -> str:
    """The whole page."""
    parts = [f"# {escape(page.title)}", ""]
    for section in page.sections:
        if section.title:
            parts += [f"## {section.title}", ""]
        for block in section.blocks:
            parts += [*_block(block, f"{page.name}.md"), ""]
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
    ticks = "`" * (max(map(len, _TICKS.findall(text)), default=0) + 1)
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{space}{text}{space}{ticks}" if text else ""


def fence(text: str) -> str:
    """A fence longer than any in the text."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    return "`" * (longest + 1)


def _block(block: Block, page: str) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield _words(block.words, page)
    elif isinstance(block, Items):
        for number, item in enumerate(block.items, 1):
            yield f"{f'{number}.' if block.ordered else '-'} {_words(item, page)}"
    elif isinstance(block, Table):
        yield f"| {' | '.join(block.head)} |"
        yield f"|{' --- |' * len(block.head)}"
        for row in block.rows:
            yield f"| {' | '.join(_words(cell, page, in_table=True) for cell in row)} |"
    else:
        yield from _source(block)


def _source(block: Source) -> Iterator[str]:
    marks = fence(block.text)
    yield f"{marks}{block.lexer}"
    yield block.text.removesuffix("\n")
    yield marks


def _words(words: Words, page: str, *, in_table: bool = False) -> str:
    return "".join(_inline(item, page, in_table) for item in words)


def _inline(item: Inline, page: str, in_table: bool) -> str:
    if isinstance(item, str):
        lead = " " if item[:1] == " " else ""
        tail = " " if item[-1:] == " " and len(item) > 1 else ""
        return f"{lead}{escape(item)}{tail}" if item.strip() else item
    if isinstance(item, Code):
        return code(item.text).replace("|", "\\|") if in_table else code(item.text)
    if isinstance(item, At):
        label = item.text or f"{shown(item.path)}:{item.line}"
        return f"[{escape(label)}]({relative(page, 'docs', item.path, '.html')}#L{item.line})"
    return f"[{escape(item.text)}]({relative(page, item.kind, item.path, '.md')})"
