"""The first sections of a file's page: what it is, in its own words, or derived where it has none."""

from __future__ import annotations

import posixpath

from sternway.atlas._paths import shown
from sternway.atlas._records import Definition
from sternway.atlas.pages._about import BRIEF, About
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Paragraph,
    Section,
    Strong,
    To,
    Words,
    cut,
    joined,
    section,
    sentence,
    table,
)
from sternway.atlas.pages._docstring_page import described
from sternway.atlas.read._text import lines_of

_NAMED = 12  # definitions of one kind
PARSERS = {
    "ast": "Python's own parser (ast)",
    "tree-sitter": "tree-sitter, which parses the file alone: macros are not expanded",
    "ctags": "universal-ctags, which reads declarations and does not resolve them",
    "keys": "its keys",
    "words": "its words only",
}


def overview(about: About) -> Section | None:
    """The module's docstring; without one, what the facts support."""
    lines = len(lines_of(about.text.text))
    folder = posixpath.dirname(about.path)
    head = sentence(
        Code(shown(about.path)),
        f", {about.facts.language}, {lines:,} line{'s' * (lines != 1)}. ",
        To("source", about.path, "Source"),
        " · ",
        To("kw", about.path, "Keywords"),
        " · ",
        To("index", folder, "Folder"),
    )
    said: list[Block] = []
    if about.facts.doc:
        said = [*described(about.facts.doc, about.names), sentence("(From ", about.at(about.facts.purpose_line), ".)")]
    elif derived := _derived(about):
        said = [Paragraph((Strong("Derived from the code:"), " ", *derived))]
    if about.brief:
        left_out = ", ".join(text for level, text in BRIEF.items() if level <= about.brief)
        said.insert(0, sentence(f"The file is large, so this page is brief: {left_out}."))
    entry = sentence("It is an entry point: ", about.context.is_entry, ".") if about.context.is_entry else None
    public = None
    if about.facts.exports:
        names = [(about.ref(name),) for name in about.facts.exports]
        public = sentence("Its public names, by ", Code("__all__"), ": ", *cut(names, 60), ".")
    return section("Overview", head, *said, entry, public)


def _derived(about: About) -> Words:
    """What it defines, what is called most, and what it raises."""
    parts: list[Words] = []
    tops = [item for item in about.facts.definitions if "." not in item.name and item.kind not in ("variable", "key")]
    public = [item for item in tops if not item.name.startswith("_")] or tops
    if public:
        parts.append(("defines ", *joined(_by_kind(about, public), " and ")))
    if called := _most_called(about):
        parts.append(called)
    raised = sorted({name for item in about.facts.definitions for name in item.raises})
    if raised:
        parts.append(("raises ", *cut([(Code(name),) for name in raised], 8)))
    if not parts:
        return ()
    return (*joined(parts, "; "), ".")


def _by_kind(about: About, items: list[Definition]) -> list[Words]:
    """``the classes A, B``, ``the function f``: one run of words for each kind."""
    kinds: dict[str, list[Words]] = {}
    for item in items:
        kinds.setdefault(item.kind, []).append((about.ref(item.name),))
    return [
        (f"the {kind if len(names) == 1 else _plural(kind)} ", *cut(names, _NAMED)) for kind, names in kinds.items()
    ]


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def _most_called(about: About) -> Words:
    """The definition that most other files call, if there is one."""
    others = {name: [site for site in sites if site[0] != about.path] for name, sites in about.context.callers}
    counts = sorted(((len({path for path, _ in sites}), name) for name, sites in others.items() if sites), reverse=True)
    if not counts or (len(counts) > 1 and counts[0][0] == counts[1][0]):
        return ()
    count, name = counts[0]
    most = " most," if len(counts) > 1 else ""
    files = f"from {count:,} other file{'s' * (count != 1)}, first at "
    return about.ref(name), f" is called{most} {files}", At(*others[name][0])


def metadata(about: About) -> Section | None:
    lines = len(lines_of(about.text.text))
    rows: list[tuple[Words, ...]] = [
        (("Path",), (Code(shown(about.path)),)),
        (("Language",), (about.facts.language,)),
        (("Read by",), (PARSERS[about.facts.parser],)),
        (("Size",), (f"{about.text.size:,} bytes, {lines:,} line{'s' * (lines != 1)}",)),
        (("Encoding",), (about.text.encoding,)),
        (("SHA-256",), (Code(about.text.digest),)),
    ]
    if about.facts.problem:
        rows.append((("Problem",), (about.facts.problem,)))
    if not about.text.size:
        rows.append((("Note",), ("The file is empty.",)))
    return section("File", table(("", ""), rows))
