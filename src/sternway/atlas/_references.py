"""The sections on other files: which are related, and who imports, subclasses and calls this one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sternway.atlas._about import About
from sternway.atlas._blocks import At, Block, Code, Items, Section, To, Words, cut, joined, section, sentence, table
from sternway.atlas._names import shown

_CALLS = 40  # of one definition; what is left out is counted


class References(About):
    """Related files and cross-references."""

    def related(self) -> Section | None:
        into = [path for path, _ in self.context.importers]
        both = [path for path in dict.fromkeys(self.context.imports) if path in set(into)]
        shared: list[Words] = [(To("docs", path, shown(path)), " (imports it and is imported by it)") for path in both]
        calls: dict[str, int] = {}
        for target in self.context.targets:
            calls[target.place.path] = calls.get(target.place.path, 0) + target.times
        most = sorted(calls.items(), key=lambda pair: (-pair[1], pair[0]))
        shared += [
            (To("docs", path, shown(path)), f" ({count} call{'s' * (count != 1)} into it)")
            for path, count in most
            if path not in both
        ]
        return section("Related files", Items((cut(shared, 12),)) if shared else None)

    def cross_references(self) -> Section | None:
        subclasses = [
            (name, [(Code(place.name), " ", At(place.path, place.line)) for place in places])
            for name, places in self.context.subclasses
        ]
        calls = [(name, [(At(*by),) for by in places]) for name, places in self.context.callers]
        return section(
            "Cross-references",
            self._listed("Imported by ", [(At(*by),) for by in self.context.importers]),
            self._named("subclassed by", subclasses, sys.maxsize),
            self._named("called at", calls, _CALLS),
            self._targets(),
        )

    def _listed(self, lead: str, parts: Sequence[Words]) -> Block | None:
        return sentence(lead, *joined(parts), ".") if parts else None

    def _named(self, verb: str, rows: Sequence[tuple[str, Sequence[Words]]], most: int) -> Block | None:
        return table(("name", verb), (((Code(name),), cut(parts, most)) for name, parts in rows))

    def _targets(self) -> Block | None:
        rows = (
            (
                (Code(target.place.name),),
                (At(target.place.path, target.place.line),),
                (f"{target.times:,}",),
                (self.at(target.line),),
            )
            for target in self.context.targets
        )
        return table(("calls", "defined at", "times", "first at"), rows)
