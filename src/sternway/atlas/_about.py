"""What the sections of a file's page share: the file, its facts, and links to its lines."""

from __future__ import annotations

from collections.abc import Iterator

from sternway.atlas._blocks import At, Code, Words
from sternway.atlas._context import Context
from sternway.atlas._languages import Language
from sternway.atlas._records import Definition, Fact, Facts
from sternway.atlas._text import Text


class About:
    """One file, as its page sees it."""

    def __init__(self, path: str, text: Text, language: Language, facts: Facts, context: Context) -> None:
        self.path, self.text, self.language, self.facts, self.context = path, text, language, facts, context

    def at(self, line: int) -> At:
        return At(self.path, line, f"line {line}")

    def _span(self, item: Definition) -> At:
        return At(self.path, item.line, f"lines {item.line}–{item.end}") if item.end > item.line else self.at(item.line)

    def _groups(self, name: str) -> dict[str, list[Fact]]:
        groups: dict[str, list[Fact]] = {}
        for fact in self.facts.facts:
            if fact.section == name:
                groups.setdefault(fact.kind, []).append(fact)
        return groups

    def _rows(self, groups: dict[str, list[Fact]]) -> Iterator[tuple[Words, ...]]:
        for kind, found in groups.items():
            for fact in found:
                note = (fact.note,) if fact.note else ()
                yield (kind,), (Code(fact.text),), note, (self.at(fact.line),)
