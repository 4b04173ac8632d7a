"""What the sections of a file's page share: the file, its facts, and links to its lines."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sternway.atlas._records import Definition, Fact, Facts
from sternway.atlas.pages._blocks import At, Code, Inline, Ref, Words
from sternway.atlas.pages._prose import Names
from sternway.atlas.read._languages import Language
from sternway.atlas.read._text import Text
from sternway.atlas.relate._context import FileContext
from sternway.atlas.relate._usage import UsageSite


class Brief(enum.IntEnum):
    """How much the page of a large file leaves out; each adds to those before."""

    NOTHING = 0
    LINES = 1
    LISTS = 2
    PRIVATE = 3
    DOCSTRINGS = 4
    FUNCTIONS = 5
    SIGNATURES = 6
    NAMES = 7


BRIEF = {
    Brief.LINES: "as Markdown it names its own lines without links",
    Brief.LISTS: "long lists are cut",
    Brief.PRIVATE: "private functions are in tables",
    Brief.DOCSTRINGS: "docstrings are cut to their first paragraph",
    Brief.FUNCTIONS: "all functions are in tables",
    Brief.SIGNATURES: "signatures are left out",
    Brief.NAMES: "inherited members are left out, and of functions without an article and fields only names are given",
}
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
    brief: Brief = Brief.NOTHING

    def at(self, line: int) -> At:
        return At(self.path, line, f"line {line}")

    def span(self, item: Definition) -> At:
        return At(self.path, item.line, f"lines {item.line}–{item.end}") if item.end > item.line else self.at(item.line)

    def places(self, sites: Iterable[tuple[str, int]]) -> list[Words]:
        """Links to lines: a file is named once where several lines of it follow each other, this one never."""
        found: list[Words] = []
        before = ""
        for path, line in sites:
            label = str(line) if path == before else f"line {line}" if path == self.path else ""
            found.append((At(path, line, label),))
            before = path
        return found

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
            for fact in found[: _CUT if self.brief >= Brief.LISTS else None]:
                note = (fact.note,) if fact.note else ()
                yield (kind,), (Code(fact.text),), note, (self.at(fact.line),)


def by_weight(facts: list[Fact]) -> list[Fact]:
    """Findings, the weightiest first."""
    return sorted(facts, key=lambda fact: (_WEIGHTS.index(fact.weight), fact.kind, fact.line, fact.text))
