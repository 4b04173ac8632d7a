"""The page of one file: all sections that are not empty, and then the source."""

from __future__ import annotations

import posixpath

from sternway.atlas._paths import file_page, shown
from sternway.atlas._records import Definition
from sternway.atlas.pages._about import About
from sternway.atlas.pages._blocks import (
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
from sternway.atlas.pages._references import cross_references, related
from sternway.atlas.pages._training_page import measured, training
from sternway.atlas.read._text import lines_of

PARSERS = {
    "ast": "Python's own parser (ast)",
    "ctags": "universal-ctags, which reads declarations and does not resolve them",
    "keys": "its keys",
    "words": "its words only",
}
_FOUND = {"patterns": "Patterns", "performance": "Performance", "security": "Security"}


def file_docs(about: About) -> Page:
    """The page of a file, from its own facts and from what other files say about it."""
    return Page(
        file_page(about.path, "_docs"),
        about.path,
        posixpath.basename(shown(about.path)),
        sections(
            _metadata(about),
            _purpose(about),
            _overview(about),
            _structure(about),
            _architecture(about),
            _dependencies(about),
            _settings(about),
            *(_found(about, key, title) for key, title in _FOUND.items()),
            _testing(about),
            training(about),
            measured(about),
            related(about),
            cross_references(about),
            section("Original source", Source(about.text.text, about.language.lexer)),
        ),
        is_file=True,
    )


def _metadata(about: About) -> Section | None:
    lines = len(lines_of(about.text.text))
    rows: list[tuple[Words, ...]] = [
        (("Path",), (Code(shown(about.path)),)),
        (("Language",), (about.facts.language,)),
        (("Read by",), (PARSERS[about.facts.parser],)),
        (("Size",), (f"{about.text.size:,} bytes, {lines:,} line{'s' * (lines != 1)}",)),
        (("Encoding",), (about.text.encoding,)),
        (("SHA-256",), (Code(about.text.digest),)),
        (("Keywords",), (To("kw", about.path, "every identifier and word, with its lines"),)),
    ]
    if about.facts.problem:
        rows.append((("Problem",), (about.facts.problem,)))
    if not about.text.size:
        rows.append((("Note",), ("The file is empty.",)))
    return section("Metadata", table(("", ""), rows))


def _purpose(about: About) -> Section | None:
    if not about.facts.purpose:
        return None
    return section("Purpose", sentence(*prose(about.facts.purpose), " (", about.at(about.facts.purpose_line), ")"))


def _overview(about: About) -> Section | None:
    counts: dict[str, list[Definition]] = {}
    for item in about.facts.definitions:
        counts.setdefault(item.kind, []).append(item)
    parts: list[Words] = [
        (f"{len(items):,} {kind if len(items) == 1 else _plural(kind)} (first at ", about.at(items[0].line), ")")
        for kind, items in sorted(counts.items())
    ]
    said = sentence("It defines ", *joined(parts), ".") if parts else None
    entry = sentence("It is an entry point: ", about.context.is_entry, ".") if about.context.is_entry else None
    public = (
        sentence("It exports ", *cut([(Code(name),) for name in about.facts.exports], 60), " by __all__.")
        if about.facts.exports
        else None
    )
    return section("Overview", said, entry, public)


def _structure(about: About) -> Section | None:
    rows = [
        (
            (Code(item.name),),
            (("async " if item.is_async else "") + item.kind,),
            (about.span(item),),
            (Code(item.signature),) if item.signature else (),
            joined((Code("@" + name),) for name in item.decorators),
            _says(item),
        )
        for item in about.facts.definitions
    ]
    head = ("name", "kind", "where", "signature", "decorators", "says")
    return section("Structure", table(head, rows))


def _says(item: Definition) -> Words:
    if not item.raises:
        return prose(item.doc)
    return (*prose(item.doc), " Documents raising ", *joined((Code(name),) for name in item.raises), ".")


def _architecture(about: About) -> Section | None:
    rows: list[tuple[Words, ...]] = []
    for base, symbol in zip(about.facts.bases, about.context.bases, strict=True):
        known = symbol is not None and symbol.name
        where: Words = (At(symbol.path, symbol.line),) if symbol is not None and known else ()
        state = "" if where else "unresolved" if base.name.startswith("?") else "outside the tree"
        rows.append(((Code(base.owner),), (Code(base.name.lstrip("?")),), where or (state,), (about.at(base.line),)))
    cycle = None
    if about.context.cycle:
        others = [(To("docs", path, shown(path)),) for path in about.context.cycle if path != about.path]
        cycle = sentence("It is in an import cycle with ", *cut(others, 12), ".")
    return section("Architecture", table(("class", "base", "defined at", "where"), rows), cycle)


def _dependencies(about: About) -> Section | None:
    rows = []
    for item, target in zip(about.facts.imports, about.context.imports, strict=True):
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
                (about.at(item.line),),
            )
        )
    return section("Dependencies", table(("module", "name", "as", "resolves to", "runs", "where"), rows))


def _settings(about: About) -> Section | None:
    readers = dict(about.context.readers)
    rows = []
    for item in about.facts.options:
        reads = [(about.at(line),) for line in item.reads]
        if item.kind == "key":
            reads = [(At(path, line),) for path, line in readers.get(item.name, ())]
        value = (Code(item.default),) if item.default else ()
        rows.append(((Code(item.name),), (item.kind,), value, cut(reads, 8), (about.at(item.line),)))
    return section(
        "Settings",
        table(("name", "kind", "value or default", "same key read at", "where"), rows)
        if about.facts.parser == "keys"
        else table(("name", "kind", "default", "read at", "where"), rows),
    )


def _found(about: About, key: str, title: str) -> Section | None:
    return section(title, table(("kind", "what", "more", "where"), about.rows(about.groups(key))))


def _testing(about: About) -> Section | None:
    rows = about.rows(about.groups("testing"))
    tests = about.context.tests
    by = sentence("Test files that import it: ", *cut([(At(*test),) for test in tests], 20), ".") if tests else None
    return section("Testing", table(("kind", "what", "more", "where"), rows), by)


def _plural(kind: str) -> str:
    return kind + "es" if kind.endswith(("s", "sh", "ch")) else kind[:-1] + "ies" if kind.endswith("y") else kind + "s"
