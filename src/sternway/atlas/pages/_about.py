"""What the sections of a file's page share: the file, its facts, and links to its lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sternway.atlas._records import Definition, Fact, Facts
from sternway.atlas.pages._blocks import At, Code, Inline, Ref, Words
from sternway.atlas.pages._prose import Names
from sternway.atlas.read._languages import Language
from sternway.atlas.read._text import Text
from sternway.atlas.relate._context import FileContext
from sternway.atlas.relate._usage import UsageSite

BRIEF = (  # each adds to those before
    "long lists are cut",
    "private functions are in tables",
    "docstrings are cut to their first paragraph",
    "all functions are in tables",
    "signatures are left out",
    "of fields and of functions without an article only the names are given",
)
_CUT = 60  # rows of a list on a brief page
_WEIGHTS = ("high", "medium", "low", "")


class About(NamedTuple):
    """One file and everything known about it; each section of its page is a function of this."""

    path: str
    text: Text
    language: Language
    facts: Facts
    context: FileContext
    excerpts: Mapping[UsageSite, str]
    names: Names  # what mentioned names mean
    defined: Mapping[str, Definition]  # the first definition of each name
    members: Mapping[str, tuple[tuple[str, str, int], ...]]  # of each class: last part, whole name, line
    brief: int = 0  # how much a page of a large file leaves out: see BRIEF

    def at(self, line: int) -> At:
        return At(self.path, line, f"line {line}")

    def span(self, item: Definition) -> At:
        return At(self.path, item.line, f"lines {item.line}–{item.end}") if item.end > item.line else self.at(item.line)

    def ref(self, name: str) -> Inline:
        """A definition of this file by name, linked."""
        item = self.defined.get(name)
        return Ref(name, self.path, name, item.line) if item else Code(name)

    def found(self, section: str) -> list[Fact]:
        return [fact for fact in self.facts.facts if fact.section == section]

    def groups(self, section: str) -> dict[str, list[Fact]]:
        """The facts of one section, by kind."""
        groups: dict[str, list[Fact]] = {}
        for fact in self.found(section):
            groups.setdefault(fact.kind, []).append(fact)
        return groups

    def rows(self, groups: dict[str, list[Fact]]) -> Iterator[tuple[Words, ...]]:
        """A table row for each fact: kind, code, note, line."""
        for kind, found in groups.items():
            for fact in found[: _CUT if self.brief else None]:
                note = (fact.note,) if fact.note else ()
                yield (kind,), (Code(fact.text),), note, (self.at(fact.line),)


def by_weight(facts: list[Fact]) -> list[Fact]:
    """Findings, the weightiest first."""
    return sorted(facts, key=lambda fact: (_WEIGHTS.index(fact.weight), fact.kind, fact.line, fact.text))
