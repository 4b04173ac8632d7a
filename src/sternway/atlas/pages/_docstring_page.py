"""A docstring as blocks: its text, and its sections (Args, Returns, Raises…) as griffe's parsers find them."""

from __future__ import annotations

import ast
import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

from griffe import Docstring, Parser

from sternway.atlas.pages._blocks import Block, Code, Fence, Items, Note, Paragraph, Strong, Words, table
from sternway.atlas.pages._prose import Names, prose, read

_NUMPY = re.compile(
    r"^[ \t]*(Parameters|Returns|Raises|Yields|Examples?|Notes?|Attributes|Other Parameters|See Also|References|Warns)"
    r"[ \t]*\n[ \t]*-{3,}[ \t]*$",
    re.MULTILINE,
)
_SPHINX = re.compile(r"^[ \t]*:(param|type|returns?|rtype|raises?|var|ivar|vartype|keyword)\b[^:\n]*:", re.MULTILINE)
_GOOGLE = re.compile(
    r"^[ \t]*(Args|Arguments|Params|Parameters|Keyword Args|Keyword Arguments|Other Parameters|Returns?|Yields?|Raises"
    r"|Attributes|Examples?|Notes?|Warnings?|Warns|Receives|Shape|References?|See Also|Todo):[ \t]*$",
    re.MULTILINE,
)
_SPACED = re.compile(r"(\*{0,2}\w+) \((.*)\)\s*$")
_LISTS = {"parameters": "Parameters", "other parameters": "Other parameters", "attributes": "Attributes"}
_RESULTS = {"returns": "Returns", "yields": "Yields", "receives": "Receives"}
_TOLD = {"raises": "Raises", "warns": "Warns"}


@functools.cache
def _quiet() -> None:
    logging.getLogger("griffe").setLevel(logging.CRITICAL)  # mistakes in docstrings are not ours to report


def style(text: str) -> Parser | None:
    """The style whose sections a docstring has; None if it has none."""
    if _NUMPY.search(text):
        return Parser.numpy
    if _SPHINX.search(text):
        return Parser.sphinx
    return Parser.google if _GOOGLE.search(text) else None


def described(text: str, names: Names, signature: str = "") -> list[Block]:
    """All blocks of a docstring. ``signature``: gives types and defaults that the docstring leaves out."""
    parser = style(text)
    if parser is None:
        return read(text, names)
    _quiet()
    try:
        options = {"returns_multiple_items": False} if parser is Parser.google else {}
        parts = Docstring(text, lineno=1).parse(parser, **options)
    except Exception:  # a docstring that griffe cannot parse is shown as text
        return read(text, names)
    return [block for part in parts for block in _section(part, names, signature)]


def _section(part: Any, names: Names, signature: str) -> Iterator[Block]:
    kind, value = part.kind.value, part.value
    if kind == "text":
        yield from read(value, names)
    elif kind in _LISTS:
        yield Paragraph((Strong(part.title or _LISTS[kind]),))
        found = _arguments(signature)
        rows = (_row(item, names, found) for item in value)
        if (made := table(("name", "type", "default", "meaning"), rows)) is not None:
            yield made
    elif kind in _RESULTS:
        said = [_result(item, names) for item in value]
        lead = Strong(part.title or _RESULTS[kind])
        if len(said) == 1:
            yield Paragraph((lead, " ", *said[0]))
        else:
            yield Paragraph((lead,))
            yield Items(tuple(said))
    elif kind in _TOLD:
        yield Paragraph((Strong(part.title or _TOLD[kind]),))
        yield Items(tuple(_told(str(item.annotation or ""), item.description, names) for item in value))
    elif kind == "examples":
        yield Paragraph((Strong(part.title or "Examples"),))
        for what, text in value:
            if what.value == "text":
                yield from read(text, names)
            else:
                yield Fence(text, "python")
    elif kind == "admonition":
        kind, title = value.kind.replace("-", " ").capitalize(), part.title or ""
        if kind == "See also":
            lines = re.split(r"\n(?=\S)", value.contents)
            yield Note(kind, (Items(tuple(_words(line, names) for line in lines)),))
            return
        if kind in ("Example", "Examples"):
            yield Paragraph((Strong(title or kind),))
            yield from read(value.contents, names)
            return
        whole = title if not title or title.lower().startswith(kind.lower()) else f"{kind}: {title}"
        yield Note(whole or kind, tuple(read(value.contents, names)))
    elif kind == "deprecated":
        yield Note("Deprecated", tuple(read(f"{value.version} {value.description}", names)))
    else:
        yield Paragraph((Strong(part.title or kind.capitalize()),))
        yield Items(tuple(_told(item.name, item.description, names) for item in value))


def _words(text: str, names: Names) -> Words:
    return prose(" ".join(text.split()), names)


def _row(item: Any, names: Names, arguments: dict[str, tuple[str, str]]) -> tuple[Words, ...]:
    spaced = _SPACED.match(item.name)  # "name (type) : text", which griffe takes for a name
    name, said = (spaced[1], spaced[2]) if spaced else (item.name, str(item.annotation or ""))
    known = arguments.get(name.lstrip("*"), ("", ""))
    hint = said.removesuffix(", optional") or known[0]
    default = str(getattr(item, "value", None) or "") or known[1]
    return (Code(name),), _code(hint), _code(default), _words(item.description, names)


def _code(text: str) -> Words:
    text = text.strip("`")
    return (Code(text),) if text and "`" not in text else (text,) if text else ()


def _result(item: Any, names: Names) -> Words:
    hint, said = str(item.annotation or ""), _words(item.description, names)
    lead = _code(hint) if hint and len(hint) < 60 else ((hint,) if hint else ())
    if item.name:
        lead = (Code(item.name), *((" (", *lead, ")") if lead else ()))
    return (*lead, ": ", *said) if lead and said else (*lead, *said)


def _told(name: str, description: str, names: Names) -> Words:
    said = _words(description, names)
    return (Code(name), *((": ", *said) if said else ())) if name else said


@functools.lru_cache(maxsize=64)
def _arguments(signature: str) -> dict[str, tuple[str, str]]:
    """The annotation and the default of each parameter."""
    try:
        function = ast.parse(f"def f{signature}: ...").body[0]
    except SyntaxError:
        return {}
    assert isinstance(function, ast.FunctionDef)
    plain = [*function.args.posonlyargs, *function.args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(function.args.defaults)), *function.args.defaults]
    pairs = [*zip(plain, defaults, strict=True)]
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {
        item.arg: (
            ast.unparse(item.annotation) if item.annotation is not None else "",
            ast.unparse(default) if default is not None else "",
        )
        for item, default in pairs
    }
