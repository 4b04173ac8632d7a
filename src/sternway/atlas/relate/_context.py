"""What is known about a file from other files: what imports, subclasses and calls it, its tests, its cycles."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from sternway.atlas._records import Facts
from sternway.atlas.relate._history import CoChange
from sternway.atlas.relate._layers import FileLayer, layers
from sternway.atlas.relate._modules import ModuleName
from sternway.atlas.relate._names import Inherited, inherited, mentions, shared
from sternway.atlas.relate._order import cycles, importance
from sternway.atlas.relate._resolve import Resolver, Symbol
from sternway.atlas.relate._usage import TEST_FILE, ReachingTest, UsageSite, examples, hot, sites_of, tests

_MODULE_BASES = re.compile(r"torch\.nn\.(modules\.\w+\.)?(?!Parameter$|Buffer$|Uninitialized)[A-Z]\w*$")


class CallTarget(NamedTuple):
    """A definition in another file that this file calls: the line of the first call, and how many calls."""

    symbol: Symbol
    line: int
    times: int


class FileContext(NamedTuple):
    """Everything on a file's page that comes from other files."""

    imports: tuple[str, ...] = ()  # for each import of the file, as ``Resolver.imported``
    importers: tuple[tuple[str, int], ...] = ()
    bases: tuple[Symbol | None, ...] = ()  # for each base
    subclasses: tuple[tuple[str, tuple[Symbol, ...]], ...] = ()
    callers: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    targets: tuple[CallTarget, ...] = ()
    modules: tuple[str, ...] = ()  # own classes that derive from nn.Module
    importing_tests: tuple[tuple[str, int], ...] = ()
    cycle: tuple[str, ...] = ()
    readers: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()  # of a configuration file's keys
    is_entry: str = ""  # the reason, if it is an entry point
    measured: str = ""  # JSON of what was measured of this file's modules
    layer: FileLayer = FileLayer()
    links: tuple[tuple[str, Symbol], ...] = ()  # what mentioned names mean
    inherited: tuple[Inherited, ...] = ()
    calls: tuple[tuple[str, str, str], ...] = ()  # caller in this file, path and name of a definition that it calls
    examples: tuple[tuple[str, tuple[UsageSite, ...]], ...] = ()
    tests: tuple[tuple[str, tuple[ReachingTest, ...]], ...] = ()
    hot: tuple[tuple[str, str, int], ...] = ()  # own functions that a loop calls, and where
    together: tuple[CoChange, ...] = ()
    shared: tuple[tuple[str, tuple[str, ...]], ...] = ()  # other files, and the rare names that both define


class Relations(NamedTuple):
    """The import graph of a tree, and what follows from it for each file."""

    graph: dict[str, tuple[str, ...]]
    order: tuple[str, ...]  # by importance
    entries: dict[str, str]
    cycles: tuple[tuple[str, ...], ...]
    contexts: dict[str, FileContext]


def relate(
    facts: Mapping[str, Facts],
    names: Mapping[str, ModuleName],
    together: Mapping[str, tuple[CoChange, ...]] | None = None,
) -> Relations:
    """Relate the facts of all files to each other. ``together``: what changes with each file, from its history."""
    resolver = Resolver(facts, names)
    imports = {path: tuple(resolver.imported(path, item) for item in known.imports) for path, known in facts.items()}
    importers: dict[str, dict[str, int]] = defaultdict(dict)
    graph: dict[str, tuple[str, ...]] = {}
    for path, known in facts.items():
        at_import = []
        for item, target in zip(known.imports, imports[path], strict=True):
            if target in facts and target != path:
                importers[target].setdefault(path, item.line)
                if item.where == "module":
                    at_import.append(target)
        graph[path] = tuple(dict.fromkeys(at_import))
    share = importance(graph)
    order = tuple(sorted(graph, key=lambda path: (-round(share[path], 12), path)))
    groups = tuple(cycles(graph))
    in_cycle = {path: group for group in groups for path in group}
    bases = {path: tuple(resolver.base(path, base) for base in known.bases) for path, known in facts.items()}
    subclasses, modules = _classes(facts, bases)
    resolved = {path: [resolver.called(path, call) for call in known.calls] for path, known in facts.items()}
    callers, targets = _calls(facts, resolved)
    sites = sites_of(facts, resolved)
    shown, reached, looped = examples(sites), tests(facts, sites), hot(sites)
    stands, members, common = layers(graph, groups), inherited(facts, bases, resolver), shared(facts)
    keys = _key_readers(facts)
    entries = _entries(facts, resolver)
    made = {}
    for path, known in facts.items():
        by = sorted(importers.get(path, {}).items())
        made[path] = FileContext(
            imports[path],
            tuple(by),
            bases[path],
            tuple(sorted((name, tuple(sorted(symbols))) for name, symbols in subclasses.get(path, {}).items())),
            tuple(sorted((name, tuple(sorted(sites))) for name, sites in callers.get(path, {}).items())),
            targets.get(path, ()),
            tuple(sorted(modules.get(path, ()))),
            tuple((file, line) for file, line in by if TEST_FILE.search(file)),
            in_cycle.get(path, ()),
            tuple((item.name, keys.get(item.name.rpartition(".")[2], ())) for item in known.options)
            if known.parser == "keys"
            else (),
            entries.get(path, ""),
            "",
            stands[path],
            mentions(path, known, resolver, names),
            members.get(path, ()),
            _outgoing(known, resolved[path]),
            tuple(sorted(shown.get(path, ()))),
            tuple(sorted(reached.get(path, ()))),
            tuple(sorted(looped.get(path, ()))),
            (together or {}).get(path, ()),
            common.get(path, ()),
        )
    return Relations(graph, order, entries, groups, made)


def _classes(
    facts: Mapping[str, Facts], bases: Mapping[str, tuple[Symbol | None, ...]]
) -> tuple[dict[str, dict[str, list[Symbol]]], dict[str, set[str]]]:
    """Subclasses of each class, and the classes that derive from ``nn.Module``, by file."""
    subclasses: dict[str, dict[str, list[Symbol]]] = defaultdict(lambda: defaultdict(list))
    modules: dict[str, set[str]] = defaultdict(set)
    new: list[tuple[str, str]] = []
    for path, known in facts.items():
        lines = {item.name: item.line for item in known.definitions if item.kind == "class"}
        for base, symbol in zip(known.bases, bases[path], strict=True):
            if symbol is not None and symbol.name:
                subclasses[symbol.path][symbol.name].append(Symbol(path, base.owner, lines.get(base.owner, base.line)))
            is_root = base.name in ("torch.nn.Module", "torch.nn.modules.module.Module", "torch.nn.modules.Module")
            if is_root or (symbol is None and _MODULE_BASES.match(base.name)):
                new.append((path, base.owner))
    while new:
        path, name = new.pop()
        if name not in modules[path]:
            modules[path].add(name)
            new += [(symbol.path, symbol.name) for symbol in subclasses.get(path, {}).get(name, ())]
    return subclasses, modules


def _outgoing(known: Facts, resolved: list[Symbol | None]) -> tuple[tuple[str, str, str], ...]:
    found = {
        (call.scope, symbol.path, symbol.name)
        for call, symbol in zip(known.calls, resolved, strict=True)
        if symbol is not None and symbol.name
    }
    return tuple(sorted(found))


def _calls(
    facts: Mapping[str, Facts], resolved: Mapping[str, list[Symbol | None]]
) -> tuple[dict[str, dict[str, set[tuple[str, int]]]], dict[str, tuple[CallTarget, ...]]]:
    callers: dict[str, dict[str, set[tuple[str, int]]]] = defaultdict(lambda: defaultdict(set))
    targets: dict[str, tuple[CallTarget, ...]] = {}
    for path, known in facts.items():
        counts: Counter[Symbol] = Counter()
        first: dict[Symbol, int] = {}
        for call, symbol in zip(known.calls, resolved[path], strict=True):
            if symbol is not None and symbol.name:
                callers[symbol.path][symbol.name].add((path, call.line))
                if symbol.path != path:
                    counts[symbol] += 1
                    first[symbol] = min(first.get(symbol, call.line), call.line)
        targets[path] = tuple(CallTarget(symbol, first[symbol], count) for symbol, count in sorted(counts.items()))
    return callers, targets


def _key_readers(facts: Mapping[str, Facts]) -> dict[str, tuple[tuple[str, int], ...]]:
    readers: dict[str, set[tuple[str, int]]] = defaultdict(set)
    if any(known.parser == "keys" for known in facts.values()):
        for path, known in facts.items():
            for key, line in known.subscripts:
                readers[key].add((path, line))
    return {key: tuple(sorted(sites)) for key, sites in readers.items()}


def _entries(facts: Mapping[str, Facts], resolver: Resolver) -> dict[str, str]:
    """Entry points, each with the reason."""
    found = {}
    for path, known in sorted(facts.items()):
        if path.rpartition("/")[2] == "__main__.py":
            found[path] = "a package's __main__"
        elif known.main_line and not TEST_FILE.search(path):
            found[path] = f"runs as a script, by line {known.main_line}"
        elif path.rpartition("/")[2] == "pyproject.toml":
            for item in known.options:
                target = resolver.module(item.default.strip("\"'").partition(":")[0])
                if item.name.startswith("project.scripts.") and target is not None:
                    found[target] = f"the command {item.name.rpartition('.')[2]}, by {path}:{item.line}"
    return found
