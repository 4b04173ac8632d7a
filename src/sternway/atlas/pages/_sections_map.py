"""Which sections of a page have which names: the map from keywords to sections."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sternway.atlas.pages._blocks import (
    Block,
    Code,
    Diagram,
    Fence,
    Fold,
    Heading,
    Items,
    Note,
    Page,
    Paragraph,
    Ref,
    Signature,
    Table,
    Words,
)

_NAME = re.compile(r"[^\W\d]\w*")


def sections_of(page: Page, wanted: Iterable[str]) -> dict[str, list[int]]:
    """For each wanted name, the numbers of the sections that have it as code; the first section is 1."""
    names = set(wanted)
    found: dict[str, list[int]] = {}
    for number, section in enumerate(page.sections, 1):
        here = {name for text in _codes(section.blocks) for name in _NAME.findall(text)}
        for name in here & names:
            found.setdefault(name, []).append(number)
    return found


def _codes(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Fence | Signature):
            yield block.text
        elif isinstance(block, Heading):
            yield block.name
        elif isinstance(block, Diagram):
            yield from (box.text for box in block.boxes)
        elif isinstance(block, Note | Fold):
            yield from _codes(block.blocks)
        elif isinstance(block, Paragraph):
            yield from _words(block.words)
        elif isinstance(block, Items):
            for item in block.items:
                yield from _words(item)
        elif isinstance(block, Table):
            for row in block.rows:
                for cell in row:
                    yield from _words(cell)


def _words(words: Words) -> Iterator[str]:
    yield from (word.text for word in words if isinstance(word, Code | Ref))
