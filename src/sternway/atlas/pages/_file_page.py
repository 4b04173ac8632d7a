"""The pages of one file: what is known about it, section by section, and its source."""

from __future__ import annotations

import posixpath

from sternway.atlas._paths import file_page, shown
from sternway.atlas.pages._about import About, by_weight
from sternway.atlas.pages._architecture import architecture
from sternway.atlas.pages._blocks import (
    At,
    Code,
    Page,
    Section,
    Source,
    To,
    Words,
    cut,
    folded,
    joined,
    section,
    sections,
    sentence,
    table,
)
from sternway.atlas.pages._breakdown import breakdown
from sternway.atlas.pages._overview import metadata, overview
from sternway.atlas.pages._references import cross_references, related
from sternway.atlas.pages._training_page import measured, training
from sternway.atlas.pages._usage_page import hot_loops, testing, usage

_SHOWN = 25  # rows of a table before it is folded


def file_docs(about: About) -> Page:
    """The page of a file, from its own facts and from what other files say about it."""
    return Page(
        file_page(about.path, "_docs"),
        about.path,
        posixpath.basename(shown(about.path)),
        sections(
            overview(about),
            breakdown(about),
            architecture(about),
            _dependencies(about),
            _settings(about),
            _patterns(about),
            usage(about),
            _findings(about, "performance", "Performance considerations", hot_loops(about)),
            _findings(about, "security", "Security and safety", []),
            testing(about),
            training(about),
            measured(about),
            related(about),
            cross_references(about),
            metadata(about),
        ),
        is_file=True,
    )


def file_source(about: About) -> Page:
    """The file's text, on a page of its own."""
    links = sentence(To("docs", about.path, "About this file"), " · ", To("kw", about.path, "Keywords"))
    source = section("", links, Source(about.text.text, about.language.lexer))
    return Page(file_page(about.path, "_source"), about.path, shown(about.path), sections(source), is_file=True)


def _dependencies(about: About) -> Section | None:
    """One row for each import statement and target; several names in one row."""
    rows: dict[tuple[str, str, str, int], list[Words]] = {}
    for item, target in zip(about.facts.imports, about.context.imports, strict=True):
        module = "." * item.level + item.module
        renamed = item.bound if item.bound not in (item.name, item.module.partition(".")[0], item.module) else ""
        named: Words = (Code(item.name),) if item.name else ()
        if renamed and item.name != "*":
            named = (*named, " as ", Code(renamed)) if named else ("as ", Code(renamed))
        rows.setdefault((module, target, item.where, item.line), []).append(named)
    made = []
    for (module, target, where, line), names in rows.items():
        resolved: Words = (target,)
        if target not in ("standard library", "outside the tree", "unresolved"):
            resolved = (To("docs", target, shown(target)),)
        when = {"module": "", "function": "when called", "typing": "for type checkers only"}[where]
        made.append(((Code(module),), joined(filter(None, names)), resolved, (when,), (about.at(line),)))
    built = table(("module", "names", "resolves to", "runs", "where"), made)
    return section("Dependencies", folded(f"{len(made)} imports", built, len(made), 2 * _SHOWN))


def _settings(about: About) -> Section | None:
    readers = dict(about.context.readers)
    rows = []
    for item in about.facts.options:
        reads = [(about.at(line),) for line in item.reads]
        if item.kind == "key":
            reads = [(At(path, line),) for path, line in readers.get(item.name, ())]
        value = (Code(item.default),) if item.default else ()
        rows.append(((Code(item.name),), (item.kind,), value, cut(reads, 8), (about.at(item.line),)))
    head = ("name", "kind", "default", "read at", "where")
    if about.facts.parser == "keys":
        head = ("name", "kind", "value or default", "same key read at", "where")
    return section("Settings", folded(f"{len(rows):,} settings", table(head, rows), len(rows), 2 * _SHOWN))


def _patterns(about: About) -> Section | None:
    rows = list(about.rows(about.groups("patterns")))
    made = table(("pattern", "what", "more", "where"), rows)
    return section("Code patterns and idioms", folded(f"{len(rows)} places", made, len(rows), _SHOWN))


def _findings(about: About, key: str, title: str, more: list[tuple[Words, ...]]) -> Section | None:
    rows = [
        (
            (fact.weight,),
            (fact.kind,),
            (Code(fact.text),),
            (fact.note,) if fact.note else (),
            (about.at(fact.line),),
        )
        for fact in by_weight(about.found(key))
    ]
    made = table(("weight", "finding", "code", "evidence", "where"), [*rows, *more])
    return section(title, folded(f"{len(rows) + len(more)} findings", made, len(rows) + len(more), _SHOWN))
