"""Names across files: what docstrings and annotations mention, inherited members, and names that few files share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from sternway.atlas._records import Facts
from sternway.atlas.relate._modules import ModuleName
from sternway.atlas.relate._resolve import Resolver, Symbol

_RARE = 4  # files that may have a name for it to relate them
_LEAST = 3  # names in common
_MOST = 4  # files listed for one file
_DEEPEST = 12  # bases of bases


class Inherited(NamedTuple):
    """What a class has from one base in the tree: the base, and its members that the class does not define."""

    owner: str
    base: Symbol
    members: tuple[str, ...]


def mentions(
    path: str, known: Facts, resolver: Resolver, names: Mapping[str, ModuleName]
) -> tuple[tuple[str, Symbol], ...]:
    """The mentioned names that mean a definition in the tree."""
    module = names[path].module if path in names else ""
    own = resolver.definitions(path)
    found = []
    for text in known.mentions:
        symbol = None
        if text in own:
            symbol = Symbol(path, text, own[text].line)
        elif module:
            symbol = resolver.symbol(f"{module}.{text}") or (resolver.symbol(text) if "." in text else None)
        if symbol is not None and symbol.name:
            found.append((text, symbol))
    return tuple(found)


def inherited(
    facts: Mapping[str, Facts], bases: Mapping[str, tuple[Symbol | None, ...]], resolver: Resolver
) -> dict[str, tuple[Inherited, ...]]:
    """For each file, what its classes inherit from classes in the tree, the nearest base first."""
    above: dict[tuple[str, str], list[Symbol]] = defaultdict(list)
    for path, known in facts.items():
        for base, symbol in zip(known.bases, bases[path], strict=True):
            if symbol is not None and symbol.name and (symbol.path, symbol.name) != (path, base.owner):
                above[path, base.owner].append(symbol)
    members: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in facts:
        for name, item in resolver.definitions(path).items():
            owner, _, last = name.rpartition(".")
            if owner and item.kind in ("method", "variable") and not last.startswith("_"):
                members[path, owner].append(last)
    made: dict[str, list[Inherited]] = defaultdict(list)
    for path, owner in above:
        seen = set(members.get((path, owner), ()))
        waiting, visited = list(above[path, owner]), {(path, owner)}
        while waiting and len(visited) < _DEEPEST:
            symbol = waiting.pop(0)
            place = symbol.path, symbol.name
            if place in visited:
                continue
            visited.add(place)
            new = tuple(name for name in members.get(place, ()) if name not in seen)
            seen.update(new)
            if new:
                made[path].append(Inherited(owner, symbol, new))
            waiting += above.get(place, ())
    return {path: tuple(rows) for path, rows in made.items()}


def shared(facts: Mapping[str, Facts]) -> dict[str, tuple[tuple[str, tuple[str, ...]], ...]]:
    """For each file, others that define at least three of the same names, which few files define."""
    files: dict[str, list[str]] = defaultdict(list)
    for path, known in facts.items():
        tails = {item.name.rpartition(".")[2] for item in known.definitions}
        for name in tails:
            if len(name) > 3 and not name.startswith("__"):
                files[name].append(path)
    common: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, paths in sorted(files.items()):
        if 2 <= len(paths) <= _RARE:
            for one in paths:
                for other in paths:
                    if one != other:
                        common[one][other].append(name)
    found = {}
    for path, others in common.items():
        counts = Counter({other: len(names) for other, names in others.items() if len(names) >= _LEAST})
        best = sorted(counts, key=lambda other: (-counts[other], other))[:_MOST]
        if best:
            found[path] = tuple((other, tuple(others[other])) for other in best)
    return found
