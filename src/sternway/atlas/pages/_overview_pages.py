"""More pages of a tree: a folder's overview (doc), and the reading order of all files."""

from __future__ import annotations

import posixpath
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from sternway.atlas._paths import folder_page, shown
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
from sternway.atlas.pages._folder_page import Folder, TreeFacts, reading_line
from sternway.atlas.relate._context import Relations
from sternway.atlas.relate._order import shortest_cycle
from sternway.atlas.relate._start import PARSED

_MOST = 30
_PAGE = 500  # files on one page of the reading order
_WHY = (
    "Commands and packages first, then public modules, then private ones; scripts, examples, benchmarks and tests "
    "last. Among equals by importance, which is PageRank over imports that run at import time: a file is important if "
    "important files import it."
)


class FolderOverview:
    """Languages, dependencies, entry points, cycles, and facts of all files below a folder."""

    def __init__(self, folder: Folder) -> None:
        self.known, self.path, self.below, self.title = folder.known, folder.path, folder.below, folder.title

    def page(self) -> Page:
        languages = Counter(self.known.facts[file].language for file in self.below)
        lines: Counter[str] = Counter()
        for file in self.below:
            lines[self.known.facts[file].language] += self.known.lines[file]
        rows = (((name,), (f"{count:,}",), (f"{lines[name]:,}",)) for name, count in languages.most_common())
        return Page(
            folder_page(self.path, "doc"),
            self.path,
            f"Overview of {self.title}",
            sections(
                section("Languages", table(("language", "files", "lines"), rows)),
                section("Most imported", self._most_imported()),
                section("Depends on", *self._depends()),
                section("Entry points", self._entries()),
                section("Import cycles", *_cycles(self.known.whole, set(self.below))),
                section("Training and backward", self._found("training")),
                section("Threads, processes and programs", self._found("starts")),
                section("Performance", self._found("performance")),
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


def reading_pages(known: TreeFacts) -> Iterator[Page]:
    """The whole order, on as many pages as it needs."""
    code = [path for path in known.order if known.facts[path].parser in PARSED]
    rest = sorted(set(known.order) - set(code))
    parts = _batches([*code, *rest]) or [()]
    for number, part in enumerate(parts):
        first = not number
        following = f"reading_{number + 2}" if number + 1 < len(parts) else ""
        items = Items(tuple(reading_line(known, path) for path in part), ordered=first)
        yield Page(
            "reading" if first else f"reading_{number + 1}",
            "",
            f"How to read {known.tree}" + ("" if first else f", from file {number * _PAGE + 1:,}"),
            sections(
                section("", sentence(_WHY)) if first else None,
                section("Order", items, sentence(To(following, "", "The next files"), ".") if following else None),
                section("Import cycles", *_cycles(known.whole, set(known.order))) if first else None,
            ),
        )


def _batches(paths: list[str]) -> list[tuple[str, ...]]:
    return [tuple(paths[start : start + _PAGE]) for start in range(0, len(paths), _PAGE)]


def _cycles(whole: Relations, inside: set[str]) -> Iterable[Block | None]:
    groups = [group for group in whole.cycles if inside.issuperset(group)]
    for group in groups[:_MOST]:
        way = shortest_cycle(whole.graph, group)
        links = [(To("docs", path, shown(path)),) for path in way]
        size = f"{len(group):,} files that reach each other; the shortest way round from the first: "
        yield sentence(size, *cut(links, 20, " → "), ".")
    if len(groups) > _MOST:
        yield sentence(f"{_MOST} of {len(groups):,} cycles.")
