"""The section on what a file defines: every class, function and name, with signature, docstring and source line."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sternway.atlas._records import Definition
from sternway.atlas.pages._about import About, Brief
from sternway.atlas.pages._blocks import (
    At,
    Block,
    Code,
    Heading,
    Paragraph,
    Ref,
    Section,
    Signature,
    Words,
    cut,
    joined,
    section,
    table,
)
from sternway.atlas.pages._docstring_page import described
from sternway.atlas.pages._prose import Names, prose
from sternway.atlas.python._docstrings import first_paragraph
from sternway.atlas.relate._resolve import Symbol

_INHERITED = 20  # members of one base that are named
_FEW = 4  # of them on a brief page
_WIDEST = 92  # characters of a signature on one line
_PARAMETER = re.compile(r"\b([^\W\d]\w*)\b(?=\s*[:,=)])")
_CLASSES = frozenset(("class", "struct", "union", "interface", "enum", "namespace", "type"))
_LABELS = {
    "property": "property",
    "cached_property": "property",
    "classmethod": "class method",
    "staticmethod": "static method",
}


def breakdown(about: About) -> Section | None:
    """Classes and documented functions one by one in the order of the source; all other names in tables."""
    groups: dict[str, list[Definition]] = {}
    for item in about.facts.definitions:
        groups.setdefault(item.name, []).append(item)
    classes = {name for name, items in groups.items() if items[0].kind in _CLASSES}
    members: dict[str, list[str]] = {}
    for name in groups:
        members.setdefault(_owner(name, classes), []).append(name)
    rest: list[str] = []
    blocks: list[Block | None] = []
    for name in members.get("", ()):
        if name in classes:
            blocks += _class(about, name, groups, members, classes)
        elif _has_article(about, groups[name]):
            blocks += _article(about, groups[name], 3)
        else:
            rest.append(name)
    return section("Detailed breakdown", *blocks, *_tables(about, rest, groups, ""))


def _has_article(about: About, items: list[Definition]) -> bool:
    """Documented functions have; in a brief page, private ones or all are rows of a table."""
    private = items[0].name.rpartition(".")[2].startswith("_")
    return (
        items[0].kind != "variable"
        and any(item.doc for item in items)
        and not (about.brief >= Brief.FUNCTIONS or (about.brief >= Brief.PRIVATE and private))
    )


def _owner(name: str, classes: set[str]) -> str:
    """The class around a name; a function inside a function has none."""
    for mark in ("::", "."):
        owner = name.rpartition(mark)[0]
        if owner in classes:
            return owner
    return ""


def _class(
    about: About, name: str, groups: dict[str, list[Definition]], members: dict[str, list[str]], classes: set[str]
) -> Iterator[Block | None]:
    yield from _article(about, groups[name], 3)
    rest = []
    for member in members.get(name, ()):
        items = groups[member]
        if items[0].kind not in _CLASSES and _has_article(about, items):
            yield from _article(about, items, 4)
        elif member not in classes:
            rest.append(member)
    yield from _tables(about, rest, groups, name)
    for row in about.context.inherited:
        if row.owner == name and about.brief < Brief.NAMES:
            base = Ref(row.base.name, row.base.path, row.base.name, row.base.line)
            most = _INHERITED if about.brief < Brief.LISTS else _FEW
            yield Paragraph(("Inherited from ", base, ": ", *cut([(member,) for member in row.members], most), "."))
    for member in members.get(name, ()):
        if member in classes:
            yield from _class(about, member, groups, members, classes)


def _article(about: About, items: list[Definition], level: int) -> Iterator[Block | None]:
    """One definition, or several of the same name: overloads, and definitions under conditions."""
    first = items[0]
    yield Heading(level, first.name, label(first), first.name)
    seen = set()
    for item in items:
        if item.kind == "variable":  # the class's name is given to something else
            yield Paragraph(("assigned at ", about.span(item)))
            continue
        if about.facts.parser == "ast" or item.signature:
            yield Signature(_head(item), about.language.lexer, _links(about, item))
        yield Paragraph((about.span(item),))
        if item.doc and item.doc not in seen:
            seen.add(item.doc)
            if about.brief >= Brief.DOCSTRINGS:
                yield Paragraph(prose(first_paragraph(item.doc), _names(about, item)))
            else:
                yield from described(item.doc, _names(about, item), _parameters(about, item))


def _parameters(about: About, item: Definition) -> str:
    """The signature that a docstring's parameters are of: a class has that of its ``__init__``."""
    if item.kind != "class":
        return item.signature
    made_by = about.defined.get(f"{item.name}.__init__")
    return made_by.signature if made_by is not None else ""


def _names(about: About, item: Definition) -> Names:
    """What names mean in a docstring: members of the class around, but never the function's own parameters."""
    owner = item.name if item.kind == "class" else item.name.rpartition(".")[0]
    names = dict(about.names)
    if owner in about.members:
        names |= {
            tail: Symbol(about.path, name, line) for tail, name, line in about.members[owner] if tail not in names
        }
    for parameter in _PARAMETER.findall(item.signature) if item.kind != "class" else ():
        names.pop(parameter, None)
    return names


def label(item: Definition) -> str:
    """What a definition is called: a property is a method with a decorator."""
    for decorator in item.decorators:
        if found := _LABELS.get(decorator.rpartition(".")[2]):
            return found
    return f"async {item.kind}" if item.is_async else item.kind


def _head(item: Definition) -> str:
    """The first lines of a definition, as Python writes them; for other languages, the declaration."""
    last = item.name.rpartition(".")[2]
    word = "class" if item.kind == "class" else "async def" if item.is_async else "def"
    if item.kind not in ("class", "function", "method") or not (item.signature[:1] == "(" or not item.signature):
        return item.signature
    lines = [f"@{decorator}" for decorator in item.decorators]
    whole = f"{word} {last}{item.signature}"
    return "\n".join([*lines, whole if len(whole) <= _WIDEST else _wrapped(whole)])


def _wrapped(text: str) -> str:
    """One parameter a line."""
    depth, start, quote = 0, 0, ""
    pieces: list[str] = []
    end = len(text)
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[index - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
            if depth == 1:
                pieces, start = [text[: index + 1]], index + 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                pieces.append(f"    {text[start:index].strip()}")
                end = index
                break
        elif char == "," and depth == 1:
            pieces.append(f"    {text[start:index].strip()},")
            start = index + 1
    return "\n".join([*pieces, text[end:]]) if len(pieces) > 1 else text


def _links(about: About, item: Definition) -> tuple[Ref, ...]:
    found = []
    for text, symbol in about.names.items():
        if text in item.signature and (symbol.path, symbol.name) != (about.path, item.name):
            found.append(Ref(text, symbol.path, symbol.name, symbol.line))
    return tuple(found)


def _tables(about: About, names: list[str], groups: dict[str, list[Definition]], owner: str) -> Iterator[Block | None]:
    """Functions without a docstring, and variables, as tables."""
    items = [item for name in names for item in groups[name]]
    if about.brief >= Brief.NAMES:
        listed: list[Words] = [
            (Code(item.name, item.name), " ", At(about.path, item.line, str(item.line))) for item in items
        ]
        yield Paragraph(joined(listed)) if listed else None
        return
    rows = (
        (
            (Code(item.name, item.name),),
            (label(item),),
            (about.span(item),),
            (Code(item.signature),) if item.signature and about.brief < Brief.SIGNATURES else (),
            joined((Code("@" + name),) for name in item.decorators),
            _derived(about, item),
        )
        for item in items
        if item.kind != "variable"
    )
    derived = "docstring, or derived from the code" if about.brief else "derived from the code"
    yield table(("name", "kind", "where", "signature", "decorators", derived), rows)
    fields = (
        (
            (Code(item.name, item.name),),
            (about.span(item),),
            (Code(item.signature.removeprefix(": ")),) if item.signature else (),
            (Code(item.value),) if item.value else (),
            prose(
                " ".join(item.doc.split()) if about.brief < Brief.DOCSTRINGS else first_paragraph(item.doc), about.names
            ),
        )
        for item in items
        if item.kind == "variable"
    )
    yield table(("field" if owner else "module name", "where", "type", "value", "meaning"), fields)


def _derived(about: About, item: Definition) -> Words:
    """What the code says of a function without a docstring: what it returns and raises, and who calls it."""
    parts: list[Words] = []
    if item.doc:
        return prose(first_paragraph(item.doc), about.names)
    if item.returns:
        parts.append(("returns ", *joined((Code(text),) for text in item.returns)))
    if item.raises:
        parts.append(("raises ", *joined((Code(text),) for text in item.raises)))
    if sites := dict(about.context.callers).get(item.name):
        count = f"{len(sites):,} places, first at " if len(sites) > 1 else ""
        parts.append((f"called at {count}", *about.places(sites[:1])[0]))
    return joined(parts, "; ")
