"""The sections on other files: related files, and what imports, subclasses and calls this one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sternway.atlas._paths import shown
from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Items,
    Section,
    To,
    Words,
    cut,
    joined,
    section,
    sentence,
    table,
)

_CALLS = 40  # of one definition; what is left out is counted


def related(about: About) -> Section | None:
    into = [path for path, _ in about.context.importers]
    both = [path for path in dict.fromkeys(about.context.imports) if path in set(into)]
    shared: list[Words] = [(To("docs", path, shown(path)), " (imports it and is imported by it)") for path in both]
    calls: dict[str, int] = {}
    for target in about.context.targets:
        calls[target.symbol.path] = calls.get(target.symbol.path, 0) + target.times
    most = sorted(calls.items(), key=lambda pair: (-pair[1], pair[0]))
    shared += [
        (To("docs", path, shown(path)), f" ({count} call{'s' * (count != 1)} into it)")
        for path, count in most
        if path not in both
    ]
    return section("Related files", Items((cut(shared, 12),)) if shared else None)


def cross_references(about: About) -> Section | None:
    subclasses = [
        (name, [(Code(symbol.name), " ", At(symbol.path, symbol.line)) for symbol in symbols])
        for name, symbols in about.context.subclasses
    ]
    calls = [(name, [(At(*by),) for by in sites]) for name, sites in about.context.callers]
    return section(
        "Cross-references",
        _listed("Imported by ", [(At(*by),) for by in about.context.importers]),
        _named("subclassed by", subclasses, sys.maxsize),
        _named("called at", calls, _CALLS),
        _targets(about),
    )


def _listed(lead: str, parts: Sequence[Words]) -> Block | None:
    return sentence(lead, *joined(parts), ".") if parts else None


def _named(verb: str, rows: Sequence[tuple[str, Sequence[Words]]], most: int) -> Block | None:
    return table(("name", verb), (((Code(name),), cut(parts, most)) for name, parts in rows))


def _targets(about: About) -> Block | None:
    rows = (
        (
            (Code(target.symbol.name),),
            (At(target.symbol.path, target.symbol.line),),
            (f"{target.times:,}",),
            (about.at(target.line),),
        )
        for target in about.context.targets
    )
    return table(("calls", "defined at", "times", "first at"), rows)
