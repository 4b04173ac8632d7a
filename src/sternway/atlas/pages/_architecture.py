"""The section on a file's place in the tree: its layer, diagrams of imports and calls, bases, state, what it starts."""

from __future__ import annotations

from sternway.atlas._paths import shown
from sternway.atlas._records import Fact
from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Box,
    Code,
    Diagram,
    Paragraph,
    Ref,
    Section,
    Strong,
    Table,
    To,
    Words,
    cut,
    folded,
    section,
    sentence,
    table,
)

_SIDE = 7  # boxes on each side of an import diagram
_INSIDE, _OUTSIDE = 12, 5  # boxes of a call diagram: of this file, of others
_SHOWN = 15  # rows of a list before it is folded


def architecture(about: About) -> Section | None:
    return section(
        "Architecture and design",
        _layer(about),
        imports_diagram(about),
        calls_diagram(about),
        _bases(about),
        _cycle(about),
        *_listed(about, "state", "State kept by the module", ("kind", "name", "how", "where")),
        *_listed(about, "starts", "Threads, processes and programs", ("kind", "what", "more", "where")),
        *_private(about),
    )


def _layer(about: About) -> Block | None:
    at = about.context.layer
    if not (at.reaches or at.reached_by):
        return None
    down = f"it reaches {at.reaches:,} file{'s' * (at.reaches != 1)} of the tree" if at.reaches else ""
    up = f"{at.reached_by:,} reach{'es' * (at.reached_by == 1)} it" if at.reached_by else ""
    lowest = " (the lowest: it imports nothing of the tree)" if at.layer == 1 else ""
    highest = " (the highest)" if at.layer == at.layers and at.layers > 1 else ""
    said = ", and ".join(filter(None, (down, up)))
    return sentence(f"Layer {at.layer} of {at.layers} by imports{lowest or highest}: {said}.")


def imports_diagram(about: About) -> Diagram | None:
    """Who imports it, and what it imports of the tree."""
    above = [path for path, _ in about.context.importers]
    below = [path for path in dict.fromkeys(about.context.imports) if "." in path or "/" in path]
    below = [path for path in below if path not in ("outside the tree", about.path)]
    if not above and not below:
        return None
    boxes = [*_side(above, 0), Box(shown(about.path), 1, None, True), *_side(below, 2)]
    middle = len(_side(above, 0))
    arrows = [(index, middle) for index in range(middle)]
    arrows += [(middle, index) for index in range(middle + 1, len(boxes))]
    return Diagram("Imports: left imports this file, this file imports right", tuple(boxes), tuple(arrows))


def _side(paths: list[str], column: int) -> list[Box]:
    if len(paths) <= _SIDE:
        return [Box(shown(path), column, To("docs", path, shown(path))) for path in paths]
    kept = [Box(shown(path), column, To("docs", path, shown(path))) for path in paths[: _SIDE - 1]]
    return [*kept, Box(f"{len(paths) - _SIDE + 1:,} more", column)]


def calls_diagram(about: About) -> Diagram | None:
    """Which definitions of the file call which, and the definitions of other files that they call."""
    own, other = set(), set()
    for caller, path, name in about.context.calls:
        if caller in about.defined:
            if path == about.path and name != caller:
                own.add((caller, name))
            elif path != about.path:
                other.add((caller, (path, name)))
    degree: dict[str, int] = {}
    for pair in own:
        for name in pair:
            degree[name] = degree.get(name, 0) + 1
    kept = sorted(sorted(degree, key=lambda name: (-degree[name], name))[:_INSIDE])
    inside = {(start, end) for start, end in own if start in kept and end in kept}
    if len(inside) < 2:
        return None
    kept = [name for name in kept if any(name in pair for pair in inside)]
    column = _columns(kept, inside)
    last = max(column.values()) + 1
    chosen = [pair for pair in sorted(other, key=lambda pair: (pair[1], pair[0])) if pair[0] in kept]
    outside = list(dict.fromkeys(place for _, place in chosen))[:_OUTSIDE]
    number = {name: index for index, name in enumerate(kept)}
    lines = {name: about.defined[name].line for name in kept if name in about.defined}
    boxes = [Box(name, column[name], Ref(name, about.path, name, lines[name]), True) for name in kept if name in lines]
    if len(boxes) < len(kept):
        return None
    boxes += [Box(name, last, To("docs", path, shown(path))) for path, name in outside]
    number_of = {place: len(kept) + index for index, place in enumerate(outside)}
    arrows = sorted({(number[start], number[end]) for start, end in inside})
    arrows += sorted({(number[name], number_of[place]) for name, place in chosen if place in number_of})
    return Diagram("Calls: an arrow leads from the caller to what it calls", tuple(boxes), tuple(arrows))


def _columns(names: list[str], edges: set[tuple[str, str]]) -> dict[str, int]:
    """A column for each name, to the right of its callers; calls in a circle do not count."""
    column = dict.fromkeys(names, 0)
    for _ in range(len(names)):
        changed = False
        for start, end in sorted(edges):
            if column[end] < column[start] + 1 and column[start] + 1 < 5 and (end, start) not in edges:
                column[end], changed = column[start] + 1, True
        if not changed:
            break
    used = sorted(set(column.values()))
    return {name: used.index(place) for name, place in column.items()}


def _bases(about: About) -> Table | None:
    rows: list[tuple[Words, ...]] = []
    for base, symbol in zip(about.facts.bases, about.context.bases, strict=True):
        known = symbol is not None and symbol.name
        where: Words = (At(symbol.path, symbol.line),) if symbol is not None and known else ()
        state = "" if where else "unresolved" if base.name.startswith("?") else "outside the tree"
        rows.append(((Code(base.owner),), (Code(base.name.lstrip("?")),), where or (state,), (about.at(base.line),)))
    return table(("class", "base", "defined at", "where"), rows)


def _cycle(about: About) -> Block | None:
    if not about.context.cycle:
        return None
    others = [(To("docs", path, shown(path)),) for path in about.context.cycle if path != about.path]
    return sentence("It is in an import cycle with ", *cut(others, 12), ".")


def _listed(about: About, section_: str, title: str, head: tuple[str, ...]) -> list[Block | None]:
    groups: dict[str, list[Fact]] = about.groups(section_)
    made = table(head, about.rows(groups))
    if made is None:
        return []
    count = len(made.rows)
    return [Paragraph((Strong(title),)), folded(f"{count:,} entries", made, count, _SHOWN)]


def _private(about: About) -> list[Block | None]:
    found = about.found("private")
    if not found:
        return []
    words = [(Code(fact.text), " (", about.at(fact.line), ")") for fact in found]
    title = Paragraph((Strong("Private names of other packages"),))
    return [title, folded(f"{len(words):,} names", sentence(*cut(words, len(words)), "."), len(words), _SHOWN)]
