"""The page of one file: every section that has something to say, and then the source."""

from __future__ import annotations

import posixpath

from sternway.atlas._blocks import (
    At,
    Code,
    Page,
    Section,
    Source,
    To,
    Words,
    cut,
    joined,
    prose,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas._context import Context
from sternway.atlas._languages import Language
from sternway.atlas._names import file_page, shown
from sternway.atlas._records import Definition, Facts
from sternway.atlas._references import References
from sternway.atlas._text import Text, lines_of
from sternway.atlas._training_page import Training

PARSERS = {
    "ast": "Python's own parser (ast)",
    "ctags": "universal-ctags, which reads declarations and does not resolve them",
    "keys": "its keys",
    "words": "its words only",
}
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


class _About(Training, References):
    """The sections that are about the file itself."""

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
        return section("Purpose", sentence(*prose(self.facts.purpose), " (", self.at(self.facts.purpose_line), ")"))

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
                (self._span(item),),
                (Code(item.signature),) if item.signature else (),
                joined((Code("@" + name),) for name in item.decorators),
                self._says(item),
            )
            for item in self.facts.definitions
        ]
        head = ("name", "kind", "where", "signature", "decorators", "says")
        return section("Structure", table(head, rows))

    def _says(self, item: Definition) -> Words:
        if not item.raises:
            return prose(item.doc)
        return (*prose(item.doc), " Documents raising ", *joined((Code(name),) for name in item.raises), ".")

    def architecture(self) -> Section | None:
        rows: list[tuple[Words, ...]] = []
        for base, place in zip(self.facts.bases, self.context.bases, strict=True):
            known = place is not None and place.name
            where: Words = (At(place.path, place.line),) if place is not None and known else ()
            state = "" if where else "unresolved" if base.name.startswith("?") else "outside the tree"
            rows.append(((Code(base.owner),), (Code(base.name.lstrip("?")),), where or (state,), (self.at(base.line),)))
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

    def found(self, key: str, title: str) -> Section | None:
        return section(title, table(("kind", "what", "more", "where"), self._rows(self._groups(key))))

    def testing(self) -> Section | None:
        rows = self._rows(self._groups("testing"))
        tests = self.context.tests
        by = sentence("Test files that import it: ", *cut([(At(*test),) for test in tests], 20), ".") if tests else None
        return section("Testing", table(("kind", "what", "more", "where"), rows), by)


def _plural(kind: str) -> str:
    return kind + "es" if kind.endswith(("s", "sh", "ch")) else kind[:-1] + "ies" if kind.endswith("y") else kind + "s"
