"""The pages of a folder: its contents (index), and an overview (doc)."""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sternway.atlas._paths import folder_page, shown
from sternway.atlas._records import Facts
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Items,
    Page,
    To,
    Words,
    cut,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas.pages._prose import prose
from sternway.atlas.read._tree import FileProblem
from sternway.atlas.relate._context import Relations
from sternway.atlas.relate._order import shortest_cycle

_FIRST = 40  # of the reading order, on the first page
_MOST = 30


class TreeFacts(NamedTuple):
    """What is known about a tree when its folder pages are made."""

    tree: str
    facts: Mapping[str, Facts]
    lines: Mapping[str, int]
    whole: Relations
    problems: Sequence[FileProblem]
    folders: Sequence[str]


class Folder:
    """One folder, with the files directly in it and all files below."""

    def __init__(self, known: TreeFacts, path: str) -> None:
        self.known, self.path = known, path
        start = f"{path}/" if path else ""
        self.below = [file for file in known.facts if file.startswith(start)]
        self.direct = [file for file in self.below if "/" not in file[len(start) :]]
        self.folders = [one for one in known.folders if one.startswith(start) and "/" not in one[len(start) :] and one]
        self.problems = [item for item in known.problems if posixpath.dirname(item.path) == path]
        self.title = shown(posixpath.basename(path)) if path else known.tree

    def index(self) -> Page:
        """Subfolders, files, and files without a page; for the top folder also where to start."""
        return Page(
            folder_page(self.path, "index"),
            self.path,
            self.title,
            sections(
                section(
                    "Pages",
                    Items(
                        (
                            (To("doc", self.path, "Overview"), ": languages, dependencies, training facts, security"),
                            (To("sub", self.path, "Definitions"), ": every name that is defined below this folder, by letter"),
                        )
                    ),
                ),
                section("Where to start", *self._start()) if not self.path else None,
                section("Folders", table(("folder", "files", "lines"), map(self._folder_row, self.folders))),
                section("Files", table(("file", "language", "lines", "purpose"), map(self._file_row, self.direct))),
                section(
                    "Without a page",
                    table(
                        ("path", "why", "more"),
                        (((Code(shown(item.path)),), (item.kind,), (item.text,)) for item in self.problems),
                    ),
                ),
            ),
        )

    def _folder_row(self, path: str) -> tuple[Words, ...]:
        inside = [file for file in self.below if file.startswith(f"{path}/")]
        lines = sum(self.known.lines[file] for file in inside)
        return (To("index", path, shown(posixpath.basename(path)) + "/"),), (f"{len(inside):,}",), (f"{lines:,}",)

    def _file_row(self, path: str) -> tuple[Words, ...]:
        facts = self.known.facts[path]
        said: Words = (*prose(facts.purpose), " ", At(path, facts.purpose_line, f"line {facts.purpose_line}"))
        return (
            (To("docs", path, shown(posixpath.basename(path))),),
            (facts.language,),
            (f"{self.known.lines[path]:,}",),
            said if facts.purpose else (),
        )

    def _start(self) -> Iterable[Block | None]:
        order = reading_order(self.known.whole)
        yield Items(tuple(map(self._reading, order[:_FIRST])), ordered=True)
        if len(order) > _FIRST:
            yield sentence(f"{_FIRST} of {len(order):,} files; ", To("reading", "", "the whole reading order"), ".")
        else:
            yield sentence(To("reading", "", "The reading order on a page of its own"), ".")

    def _reading(self, path: str) -> Words:
        return reading_line(self.known, path)

    def doc(self) -> Page:
        """Languages, dependencies, entry points, cycles, and facts of all files below."""
        languages = Counter(self.known.facts[file].language for file in self.below)
        lines: Counter[str] = Counter()
        for file in self.below:
            lines[self.known.facts[file].language] += self.known.lines[file]
        init = f"{self.path}/__init__.py" if self.path else "__init__.py"
        facts = self.known.facts.get(init)
        return Page(
            folder_page(self.path, "doc"),
            self.path,
            f"Overview of {self.title}",
            sections(
                section("Purpose", sentence(*prose(facts.purpose), " (", At(init, facts.purpose_line), ")"))
                if facts and facts.purpose
                else None,
                section(
                    "Languages",
                    table(
                        ("language", "files", "lines"),
                        (((name,), (f"{count:,}",), (f"{lines[name]:,}",)) for name, count in languages.most_common()),
                    ),
                ),
                section("Most imported", self._most_imported()),
                section("Depends on", *self._depends()),
                section("Entry points", self._entries()),
                section("Import cycles", *_cycles(self.known.whole, set(self.below))),
                section("Training", self._found("training")),
                section("Security", self._found("security")),
                section("Tests", self._found("testing")),
            ),
        )

    def _most_imported(self) -> Block | None:
        counts = [(len(self.known.whole.contexts[file].importers), file) for file in self.below]
        best = sorted(((count, file) for count, file in counts if count), key=lambda pair: (-pair[0], pair[1]))
        rows = (((To("docs", file, shown(file)),), (f"{count:,}",)) for count, file in best[:_MOST])
        return table(("file", f"files that import it ({min(_MOST, len(best))} of {len(best):,} shown)"), rows)

    def _depends(self) -> Iterable[Block | None]:
        inside = set(self.below)
        folders: Counter[str] = Counter()
        packages: dict[str, list[tuple[str, int]]] = defaultdict(list)
        unresolved: list[Words] = []
        for file in self.below:
            facts = self.known.facts[file]
            for item, target in zip(facts.imports, self.known.whole.contexts[file].imports, strict=True):
                if target == "unresolved":
                    unresolved.append((Code("." * item.level + item.module), " at ", At(file, item.line)))
                elif target == "outside the tree" and facts.language == "Python":
                    packages[item.module.partition(".")[0]].append((file, item.line))
                elif target in self.known.facts and target not in inside:
                    folders[posixpath.dirname(target)] += 1
        rows = (
            ((To("index", path, shown(path) or self.known.tree),), (f"{count:,}",))
            for path, count in sorted(folders.items(), key=lambda pair: (-pair[1], pair[0]))[:_MOST]
        )
        yield table(("folder outside this one", "imports"), rows)
        outside = sorted(packages.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        yield table(
            ("package outside the tree", "imports", "first at"),
            (((Code(name),), (f"{len(places):,}",), (At(*min(places)),)) for name, places in outside),
        )
        if unresolved:
            yield sentence("Unresolved: ", *cut(unresolved, _MOST), ".")

    def _entries(self) -> Block | None:
        rows = [(file, self.known.whole.entries[file]) for file in self.below if file in self.known.whole.entries]
        return table(("file", "why"), (((To("docs", file, shown(file)),), (why,)) for file, why in rows))

    def _found(self, name: str) -> Block | None:
        kinds: dict[str, list[Words]] = defaultdict(list)
        for file in self.below:
            for fact in self.known.facts[file].facts:
                if fact.section == name:
                    kinds[fact.kind].append((At(file, fact.line),))
        return table(
            ("kind", "times", "where"),
            (((kind,), (f"{len(found):,}",), cut(found, 12)) for kind, found in sorted(kinds.items())),
        )


def reading_order(whole: Relations) -> list[str]:
    """Entry points first, then the rest by importance."""
    entries = [path for path in whole.order if path in whole.entries]
    return [*entries, *(path for path in whole.order if path not in whole.entries)]


def reading_line(known: TreeFacts, path: str) -> Words:
    context = known.whole.contexts[path]
    why = known.whole.entries.get(path, "")
    count = len(context.importers)
    said = f"entry point: {why}" if why else f"imported by {count:,} file{'s' * (count != 1)}" if count else ""
    facts = known.facts[path]
    purpose: Words = (": ", *prose(facts.purpose)) if facts.purpose else ()
    return (To("docs", path, shown(path)), *((f" ({said})",) if said else ()), *purpose)


def reading_page(known: TreeFacts) -> Page:
    """The whole order on one page."""
    order = reading_order(known.whole)
    python = [path for path in order if known.facts[path].parser in ("ast", "ctags")]
    rest = [path for path in order if path not in set(python)]
    return Page(
        "reading",
        "",
        f"How to read {known.tree}",
        sections(
            section(
                "",
                sentence(
                    "Entry points first; then by importance, which is PageRank over imports that run at import time: "
                    "a file is important if important files import it."
                ),
            ),
            section("Order", Items(tuple(reading_line(known, path) for path in python), ordered=True)),
            section("Everything else", Items(tuple(reading_line(known, path) for path in rest))),
            section("Import cycles", *_cycles(known.whole, set(order))),
        ),
    )


def _cycles(whole: Relations, inside: set[str]) -> Iterable[Block | None]:
    groups = [group for group in whole.cycles if inside.issuperset(group)]
    for group in groups[:_MOST]:
        way = shortest_cycle(whole.graph, group)
        links = [(To("docs", path, shown(path)),) for path in way]
        size = f"{len(group):,} files that reach each other; the shortest way round from the first: "
        yield sentence(size, *cut(links, 20, " → "), ".")
    if len(groups) > _MOST:
        yield sentence(f"{_MOST} of {len(groups):,} cycles.")
