"""The page of a folder: what it is for, where to start, its layers, its folders and files."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sternway.atlas._paths import folder_page, shown
from sternway.atlas._records import Facts
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Box,
    Code,
    Diagram,
    Items,
    Page,
    Ref,
    To,
    Words,
    cut,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas.pages._docstring_page import described
from sternway.atlas.pages._prose import prose
from sternway.atlas.read._tree import FileProblem
from sternway.atlas.relate._context import Relations
from sternway.atlas.relate._layers import layers
from sternway.atlas.relate._order import cycles
from sternway.atlas.relate._start import PARSED

_FIRST = 12  # files to start with
_ROWS = 60  # folders in the tree of a page
_BOXES = 22  # of a layer diagram
_NAMED = 4  # definitions that stand for a purpose


class TreeFacts(NamedTuple):
    """What is known about a tree when its folder pages are made."""

    tree: str
    facts: Mapping[str, Facts]
    lines: Mapping[str, int]
    whole: Relations
    problems: Sequence[FileProblem]
    folders: Sequence[str]
    order: Sequence[str]  # all files, in the order to read them


class Folder:
    """One folder, with the files directly in it and all files below."""

    def __init__(self, known: TreeFacts, path: str) -> None:
        self.known, self.path = known, path
        self._start = f"{path}/" if path else ""
        self.below = [file for file in known.facts if file.startswith(self._start)]
        self.direct = [file for file in self.below if "/" not in file[len(self._start) :]]
        self.folders = [one for one in known.folders if one and one.startswith(self._start)]
        self.problems = [item for item in known.problems if posixpath.dirname(item.path) == path]
        self.title = shown(posixpath.basename(path)) if path else known.tree

    def index(self) -> Page:
        """Purpose, where to start, layers, folders and files."""
        init = f"{self._start}__init__.py"
        facts = self.known.facts.get(init)
        said: list[Block] = []
        if facts is not None and facts.doc:
            said = [*described(facts.doc, dict(self.known.whole.contexts[init].links))]
            said.append(sentence("(From ", At(init, facts.purpose_line), ".)"))
        pages: list[Words] = [
            (To("doc", self.path, "Overview"), ": languages, dependencies, training facts, security"),
            (To("sub", self.path, "Definitions"), ": every name that is defined below this folder, by letter"),
        ]
        if not self.path:
            pages.append((To("reading", "", "Reading order"), ": every file, and import cycles"))
            pages.append(
                (To("backward", "", "Backward"), ": modules, backward calls, hooks, saved tensors, optimizers")
            )
        return Page(
            folder_page(self.path, "index"),
            self.path,
            self.title,
            sections(
                section("Overview", *said, Items(tuple(pages))),
                section("Where to start", self._where_to_start()),
                section("Layers", self._layers()),
                section("Folders", table(("folder", "files", "lines", "purpose"), self._tree())),
                section("Files", table(("file", "language", "lines", "purpose"), map(self._file_row, self.direct))),
                section("Without a page", self._without()),
            ),
        )

    def _where_to_start(self) -> Block | None:
        inside = set(self.below)
        code = [path for path in self.known.order if path in inside and self.known.facts[path].parser in PARSED]
        if len(code) < 3:
            return None
        return Items(tuple(reading_line(self.known, path) for path in code[:_FIRST]), ordered=True)

    def _layers(self) -> Diagram | None:
        """Files and folders directly inside, in layers: left imports right."""
        inside, counts = set(self.below), Counter[tuple[str, str]]()
        for file in self.below:
            for target in self.known.whole.graph[file]:
                one, other = self._child(file), self._child(target)
                if target in inside and one != other:
                    counts[one, other] += 1
        degree = Counter(child for pair in counts for child in pair)
        kept = sorted(sorted(degree, key=lambda one: (-degree[one], one))[:_BOXES])
        arrows = sorted(pair for pair in counts if pair[0] in kept and pair[1] in kept)
        if len(kept) < 3:
            return None
        graph = {one: tuple(end for start, end in arrows if start == one) for one in kept}
        shown_arrows = [(start, end) for start, end in arrows if not _implied(graph, start, end)]
        stands = layers(graph, tuple(cycles(graph)))
        highest = max(place.layer for place in stands.values())
        boxes = tuple(
            Box(shown(one[len(self._start) :]), highest - stands[one].layer, self._target(one)) for one in kept
        )
        number = {one: index for index, one in enumerate(kept)}
        title = "Imports inside this folder: left imports right; arrows that others imply are left out"
        if len(degree) > len(kept):
            title += f" ({len(kept)} of {len(degree)} shown, those with most imports)"
        return Diagram(title, boxes, tuple((number[start], number[end]) for start, end in shown_arrows))

    def _child(self, file: str) -> str:
        first, slash, _ = file[len(self._start) :].partition("/")
        return f"{self._start}{first}{slash}"

    def _target(self, child: str) -> To:
        folder = child.endswith("/")
        return To("index" if folder else "docs", child.removesuffix("/"), "")

    def _tree(self) -> Iterator[tuple[Words, ...]]:
        """Folders below, as deep as fits on a page."""
        depth = {path: path[len(self._start) :].count("/") for path in self.folders}
        deepest = 0
        while deepest < 3 and sum(level <= deepest + 1 for level in depth.values()) <= _ROWS:
            deepest += 1
        for path in sorted(self.folders):
            if depth[path] > deepest:
                continue
            inside = [file for file in self.below if file.startswith(f"{path}/")]
            lines = sum(self.known.lines[file] for file in inside)
            facts = self.known.facts.get(f"{path}/__init__.py")
            lead = "\u2003" * depth[path]
            link = To("index", path, shown(posixpath.basename(path)) + "/")
            said = prose(facts.purpose) if facts else ()
            yield (lead, link) if lead else (link,), (f"{len(inside):,}",), (f"{lines:,}",), said

    def _file_row(self, path: str) -> tuple[Words, ...]:
        facts = self.known.facts[path]
        return (
            (To("docs", path, shown(posixpath.basename(path))),),
            (facts.language,),
            (f"{self.known.lines[path]:,}",),
            purpose(path, facts),
        )

    def _without(self) -> Block | None:
        rows = (((Code(shown(item.path)),), (item.kind,), (item.text,)) for item in self.problems)
        return table(("path", "why", "more"), rows)


def _implied(graph: Mapping[str, tuple[str, ...]], start: str, end: str) -> bool:
    """Whether another way leads from ``start`` to ``end``, in a graph where no way leads back."""
    waiting = [one for one in graph[start] if one != end]
    seen = {start, *waiting}
    while waiting:
        for following in graph[waiting.pop()]:
            if following == start:
                return False  # a cycle: every arrow in it says something
            if following == end:
                return True
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def purpose(path: str, facts: Facts) -> Words:
    """The docstring's first paragraph; without one, the public names that the file defines."""
    if facts.purpose:
        return prose(facts.purpose)
    tops = [item for item in facts.definitions if "." not in item.name and item.kind != "variable"]
    public = [item for item in tops if not item.name.startswith("_")] or tops
    if not public:
        return ()
    names: list[Words] = [(Ref(item.name, path, item.name, item.line),) for item in public]
    return ("defines ", *cut(names, _NAMED))


def reading_line(known: TreeFacts, path: str) -> Words:
    """A file in a reading order: why it stands there, and its purpose."""
    count = len(known.whole.contexts[path].importers)
    why = known.whole.entries.get(path, "")
    said = f"entry point: {why}" if why else f"imported by {count:,} file{'s' * (count != 1)}" if count else ""
    found = purpose(path, known.facts[path])
    return (
        To("docs", path, shown(path)),
        *((f" ({said})",) if said else ()),
        *((": ", *found) if found else ()),
    )
