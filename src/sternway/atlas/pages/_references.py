"""The sections on other files: related files, and what imports, subclasses and calls this one."""

from __future__ import annotations

from collections.abc import Sequence

from sternway.atlas._paths import shown
from sternway.atlas.pages._about import About, Brief
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Section,
    To,
    Words,
    cut,
    folded,
    section,
    sentence,
    table,
)

_CALLS = 8  # of one definition; what is left out is counted
_LISTED = 60  # importers, subclasses of one class, and definitions of other files
_RELATED = 8  # files for one reason
_ROWS = 12  # rows before a table is folded


def related(about: About) -> Section | None:
    """Other files by imports both ways, calls, history and shared names; each with the reasons."""
    why: dict[str, list[str]] = {}
    into = {path for path, _ in about.context.importers}
    for path in dict.fromkeys(about.context.imports):
        if path in into:
            why.setdefault(path, []).append("imports it and is imported by it")
    calls: dict[str, int] = {}
    for target in about.context.targets:
        calls[target.symbol.path] = calls.get(target.symbol.path, 0) + target.times
    for path, count in sorted(calls.items(), key=lambda pair: (-pair[1], pair[0]))[:_RELATED]:
        why.setdefault(path, []).append(f"called {count:,} time{'s' * (count != 1)} from here")
    callers: dict[str, int] = {}
    for _, sites in about.context.callers:
        for path, _ in sites:
            callers[path] = callers.get(path, 0) + (path != about.path)
    for path, count in sorted(callers.items(), key=lambda pair: (-pair[1], pair[0]))[:_RELATED]:
        if count:
            why.setdefault(path, []).append(f"calls this file {count:,} time{'s' * (count != 1)}")
    for row in about.context.together:
        why.setdefault(row.path, []).append(f"changed with it in {row.together} of its {row.commits} commits")
    for path, names in about.context.shared:
        shown_names = ", ".join(names[:4]) + ("…" if len(names) > 4 else "")
        why.setdefault(path, []).append(f"{len(names)} names that few files define: {shown_names}")
    rows = [((To("docs", path, shown(path)),), ("; ".join(reasons),)) for path, reasons in why.items()]
    return section("Related files", folded(f"{len(rows)} files", table(("file", "why"), rows), len(rows), 2 * _RELATED))


def cross_references(about: About) -> Section | None:
    subclasses = [
        (name, [(Code(symbol.name), " ", At(symbol.path, symbol.line)) for symbol in symbols])
        for name, symbols in about.context.subclasses
    ]
    calls = [(name, about.places(sites)) for name, sites in about.context.callers]
    most = 1 if about.brief >= Brief.LISTS else _CALLS
    return section(
        "Cross-references",
        _listed("Imported by ", [(At(*by),) for by in about.context.importers]),
        _named("subclassed by", subclasses, _LISTED),
        _named("called at", calls, most),
        _targets(about),
    )


def _listed(lead: str, parts: Sequence[Words]) -> Block | None:
    return sentence(lead, *cut(parts, _LISTED), ".") if parts else None


def _named(verb: str, rows: Sequence[tuple[str, Sequence[Words]]], most: int) -> Block | None:
    made = table(("name", verb), (((Code(name),), cut(parts, most)) for name, parts in rows))
    return folded(f"{len(rows)} definitions {verb} other places", made, len(rows), _ROWS)


def _targets(about: About) -> Block | None:
    rows = [
        (
            (Code(target.symbol.name),),
            (At(target.symbol.path, target.symbol.line),),
            (f"{target.times:,}",),
            (about.at(target.line),),
        )
        for target in about.context.targets
    ]
    made = table(("calls", "defined at", "times", "first at"), rows[:_LISTED])
    shown_rows = f" ({_LISTED} shown)" if len(rows) > _LISTED else ""
    return folded(f"{len(rows)} definitions of other files that it calls{shown_rows}", made, len(rows), _ROWS)
