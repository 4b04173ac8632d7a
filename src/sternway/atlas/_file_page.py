"""The page of one file: every section that has something to say, and then the source."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence

from sternway.atlas._blocks import (
    At,
    Block,
    Code,
    Items,
    Page,
    Section,
    Source,
    To,
    Words,
    cut,
    joined,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas._context import Context
from sternway.atlas._languages import Language
from sternway.atlas._names import file_page, shown
from sternway.atlas._records import Definition, Fact, Facts
from sternway.atlas._text import Text, lines_of

PARSERS = {
    "ast": "Python's own parser (ast)",
    "ctags": "universal-ctags, which reads declarations and does not resolve them",
    "keys": "its keys",
    "words": "its words only",
}
_MOST = 40  # entries of one list; what is left out is counted
_KINDS = (
    "optimizer",
    "scheduler",
    "loss",
    "backward",
    "gradient clipping",
    "mixed precision",
    "compile",
    "data parallel",
    "process group",
    "pipeline",
    "checkpoint save",
    "checkpoint load",
    "seed",
    "data loader",
)
_FOUND = {"patterns": "Patterns", "performance": "Performance", "security": "Security"}


def file_docs(path: str, text: Text, language: Language, facts: Facts, context: Context) -> Page:
    """Build the page of ``path`` from its own facts and from what other files say."""
    about = _About(path, text, language, facts, context)
    return Page(
        file_page(path, "_docs"),
        path,
        posixpath.basename(shown(path)),
        sections(
            about.metadata(),
            about.purpose(),
            about.overview(),
            about.structure(),
            about.architecture(),
            about.dependencies(),
            about.settings(),
            *(about.found(key, title) for key, title in _FOUND.items()),
            about.testing(),
            about.training(),
            about.measured(),
            about.related(),
            about.cross_references(),
            section("Original source", Source(text.text, language.lexer)),
        ),
        is_file=True,
    )


class _About:
    def __init__(self, path: str, text: Text, language: Language, facts: Facts, context: Context) -> None:
        self.path, self.text, self.language, self.facts, self.context = path, text, language, facts, context

    def at(self, line: int) -> At:
        return At(self.path, line, f"line {line}")

    def metadata(self) -> Section | None:
        lines = len(lines_of(self.text.text))
        rows: list[tuple[Words, ...]] = [
            (("Path",), (Code(shown(self.path)),)),
            (("Language",), (self.facts.language,)),
            (("Read by",), (PARSERS[self.facts.parser],)),
            (("Size",), (f"{self.text.size:,} bytes, {lines:,} line{'s' * (lines != 1)}",)),
            (("Encoding",), (self.text.encoding,)),
            (("SHA-256",), (Code(self.text.digest),)),
            (("Keywords",), (To("kw", self.path, "every identifier and word, with its lines"),)),
        ]
        if self.facts.problem:
            rows.append((("Problem",), (self.facts.problem,)))
        if not self.text.size:
            rows.append((("Note",), ("The file is empty.",)))
        return section("Metadata", table(("", ""), rows))

    def purpose(self) -> Section | None:
        if not self.facts.purpose:
            return None
        return section("Purpose", sentence(self.facts.purpose, " (", self.at(self.facts.purpose_line), ")"))

    def overview(self) -> Section | None:
        counts: dict[str, list[Definition]] = {}
        for item in self.facts.definitions:
            counts.setdefault(item.kind, []).append(item)
        parts: list[Words] = [
            (f"{len(items):,} {kind if len(items) == 1 else _plural(kind)} (first at ", self.at(items[0].line), ")")
            for kind, items in sorted(counts.items())
        ]
        said = sentence("It defines ", *joined(parts), ".") if parts else None
        entry = sentence("It is an entry point: ", self.context.is_entry, ".") if self.context.is_entry else None
        public = (
            sentence("It exports ", *cut([(Code(name),) for name in self.facts.exports], 60), " by __all__.")
            if self.facts.exports
            else None
        )
        return section("Overview", said, entry, public)

    def structure(self) -> Section | None:
        rows = [
            (
                (Code(item.name),),
                (("async " if item.is_async else "") + item.kind,),
                (Code(item.signature),) if item.signature else (),
                joined((Code("@" + name),) for name in item.decorators),
                (item.doc,) if item.doc else (),
                joined((Code(name),) for name in item.raises),
                (self.at(item.line), f" to {item.end}") if item.end > item.line else (self.at(item.line),),
            )
            for item in self.facts.definitions
        ]
        head = ("name", "kind", "signature", "decorators", "says", "documents raising", "where")
        return section("Structure", table(head, rows))

    def architecture(self) -> Section | None:
        rows: list[tuple[Words, ...]] = []
        for base, place in zip(self.facts.bases, self.context.bases, strict=True):
            known = place is not None and place.name
            where: Words = (At(place.path, place.line),) if place is not None and known else ()
            state = "" if where else "unresolved" if base.name.startswith("?") else "outside the tree"
            rows.append(
                ((Code(base.owner),), (Code(base.name.lstrip("?")),), where or (state,), (self.at(base.line),))
            )
        cycle = None
        if self.context.cycle:
            others = [(To("docs", path, shown(path)),) for path in self.context.cycle if path != self.path]
            cycle = sentence("It is in an import cycle with ", *cut(others, 12), ".")
        return section("Architecture", table(("class", "base", "defined at", "where"), rows), cycle)

    def dependencies(self) -> Section | None:
        rows = []
        for item, target in zip(self.facts.imports, self.context.imports, strict=True):
            module = "." * item.level + item.module
            resolved: Words = (target,)
            if target not in ("standard library", "outside the tree", "unresolved"):
                resolved = (To("docs", target, shown(target)),)
            when = {"module": "", "function": "when called", "typing": "for type checkers only"}[item.where]
            name = (Code(item.name),) if item.name else ()
            renamed = item.bound if item.bound not in (item.name, item.module.partition(".")[0], item.module) else ""
            rows.append(
                (
                    (Code(module),),
                    name,
                    (Code(renamed),) if renamed and item.name != "*" else (),
                    resolved,
                    (when,),
                    (self.at(item.line),),
                )
            )
        return section("Dependencies", table(("module", "name", "as", "resolves to", "runs", "where"), rows))

    def settings(self) -> Section | None:
        readers = dict(self.context.readers)
        rows = []
        for item in self.facts.options:
            reads = [(self.at(line),) for line in item.reads]
            if item.kind == "key":
                reads = [(At(path, line),) for path, line in readers.get(item.name, ())]
            value = (Code(item.default),) if item.default else ()
            rows.append(((Code(item.name),), (item.kind,), value, cut(reads, 8), (self.at(item.line),)))
        return section(
            "Settings",
            table(("name", "kind", "value or default", "same key read at", "where"), rows)
            if self.facts.parser == "keys"
            else table(("name", "kind", "default", "read at", "where"), rows),
        )

    def _groups(self, name: str) -> dict[str, list[Fact]]:
        groups: dict[str, list[Fact]] = {}
        for fact in self.facts.facts:
            if fact.section == name:
                groups.setdefault(fact.kind, []).append(fact)
        return groups

    def _rows(self, groups: dict[str, list[Fact]]) -> Iterator[tuple[Words, ...]]:
        for kind, found in groups.items():
            for fact in found:
                note = (fact.note,) if fact.note else ()
                yield (kind,), (Code(fact.text),), note, (self.at(fact.line),)

    def found(self, key: str, title: str) -> Section | None:
        return section(title, table(("kind", "what", "more", "where"), self._rows(self._groups(key))))

    def testing(self) -> Section | None:
        rows = self._rows(self._groups("testing"))
        tests = self.context.tests
        by = sentence("Test files that import it: ", *cut([(At(*test),) for test in tests], 20), ".") if tests else None
        return section("Testing", table(("kind", "what", "more", "where"), rows), by)

    def training(self) -> Section | None:
        blocks: list[Block | None] = []
        for module in self.facts.modules:
            if module.name in self.context.modules:
                blocks.append(self._module(module.name))
        plain = {module.name for module in self.facts.modules}
        rest = [name for name in self.context.modules if name not in plain]
        if rest:
            lines = {item.name: item.line for item in self.facts.definitions if item.kind == "class"}
            blocks.append(
                sentence(
                    "Also nn.Module subclasses, with neither a forward nor submodules of their own: ",
                    *joined((Code(name), " (", self.at(lines[name]), ")") for name in rest),
                    ".",
                )
            )
        groups = self._groups("training")
        ordered = {kind: groups[kind] for kind in _KINDS if kind in groups}
        blocks.append(table(("kind", "call", "more", "where"), self._rows(ordered)))
        return section("Training", *blocks)

    def _module(self, name: str) -> Block:
        module = next(item for item in self.facts.modules if item.name == name)
        words: list[Words] = [
            (Code(name), " is an nn.Module (bases ", Code(module.base), ", ", self.at(module.line), ")")
        ]
        if module.forward:
            words.append(("forward", Code(module.forward), " at ", self.at(module.forward_line)))
        if module.parts:
            parts = [(Code(part), " = ", Code(made), " (", self.at(line), ")") for part, made, line in module.parts]
            words.append(("submodules and other objects made in __init__: ", *cut(parts, _MOST)))
        return Items((joined(words, "; "),))

    def measured(self) -> Section | None:
        if not self.context.modules:
            return None
        if not self.context.measured:
            return section("Measured", sentence("Not measured. ", "Run with --measure path.py:function to measure."))
        record = json.loads(self.context.measured)
        rows = [
            (
                (Code(row["module"]),),
                (Code(row["name"]),),
                (f"{row['parameters']:,}",),
                (f"{row['saved_bytes']:,}",),
                (f"{row['nodes']:,}",),
                (At(self.path, row["line"], f"line {row['line']}"),),
            )
            for row in record["rows"]
        ]
        return section(
            "Measured",
            table(("class", "as", "parameters", "bytes kept for backward", "backward nodes", "defined at"), rows),
            sentence("The whole of ", Code(record["target"]), ": ", record["whole"]),
            sentence("By ", Code(record["command"]), " on ", record["date"], ", ", record["machine"], "."),
        )

    def related(self) -> Section | None:
        into = [path for path, _ in self.context.importers]
        both = [path for path in dict.fromkeys(self.context.imports) if path in set(into)]
        shared: list[Words] = [(To("docs", path, shown(path)), " (imports it and is imported by it)") for path in both]
        calls: dict[str, int] = {}
        for target in self.context.targets:
            calls[target.place.path] = calls.get(target.place.path, 0) + target.count
        most = sorted(calls.items(), key=lambda pair: (-pair[1], pair[0]))
        shared += [
            (To("docs", path, shown(path)), f" ({count} call{'s' * (count != 1)} into it)")
            for path, count in most
            if path not in both
        ]
        return section("Related files", Items((cut(shared, 12),)) if shared else None)

    def cross_references(self) -> Section | None:
        return section(
            "Cross-references",
            self._listed("Imported by ", [(At(*by),) for by in self.context.importers], 1000),
            self._named("subclassed by", [
                (name, [(Code(place.name), " ", At(place.path, place.line)) for place in places])
                for name, places in self.context.subclasses
            ]),
            self._named("called at", [(name, [(At(*by),) for by in places]) for name, places in self.context.callers]),
            self._targets(),
        )

    def _listed(self, lead: str, parts: Sequence[Words], most: int) -> Block | None:
        return sentence(lead, *cut(parts, most), ".") if parts else None

    def _named(self, verb: str, rows: Sequence[tuple[str, Sequence[Words]]]) -> Block | None:
        return table(("name", verb), (((Code(name),), cut(parts, _MOST)) for name, parts in rows))

    def _targets(self) -> Block | None:
        rows = (
            (
                (Code(target.place.name),),
                (At(target.place.path, target.place.line),),
                (f"{target.count:,}",),
                (self.at(target.line),),
            )
            for target in self.context.targets
        )
        return table(("calls", "defined at", "times", "first at"), rows)


def _plural(kind: str) -> str:
    return kind + "es" if kind.endswith(("s", "sh", "ch")) else kind[:-1] + "ies" if kind.endswith("y") else kind + "s"
