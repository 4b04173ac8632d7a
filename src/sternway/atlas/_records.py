"""The facts of one file: named tuples, stored as JSON (``pack``, ``unpack``).

Named tuples, not dataclasses: a large tree has millions of them, and they are passed between processes.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Definition(NamedTuple):
    """The definition of a class, function, method or other name."""

    name: str  # "Graph.capture": dotted within the file
    kind: str  # "class", "function", "method", "variable"; for other languages, their parser's word
    line: int
    end: int
    signature: str = ""  # "(self, x: int) -> str"; for a class, its bases: "(Base, Mixin)"
    decorators: tuple[str, ...] = ()
    doc: str = ""  # the docstring, without its indentation
    doc_line: int = 0
    is_async: bool = False
    value: str = ""  # of a variable: what is assigned, where that is short
    returns: tuple[str, ...] = ()  # of a function without a docstring: what its return statements return
    raises: tuple[str, ...] = ()  # the exceptions that its own raise statements name


class Import(NamedTuple):
    """One name that an import statement binds."""

    line: int
    module: str  # as written, without the dots of a relative import
    level: int  # how many dots
    name: str  # "" for `import module`; "*" for all
    bound: str  # the name in this file
    where: str  # "module", "function" or "typing": executed on import, later, or never


class Call(NamedTuple):
    """One call; the callee is an absolute dotted name where imports and scopes determine it."""

    name: str
    line: int
    scope: str  # the definition around it, "" at module level
    first: int = 0  # the lines of the statement around it; 0 in the head of a compound statement
    last: int = 0
    loop: int = 0  # the line of the innermost loop around it


class Base(NamedTuple):
    """One base class of a class."""

    owner: str
    name: str  # absolute where known, else as written
    line: int


class Fact(NamedTuple):
    """One fact for a section of the page: ``text`` is code from the source, ``note`` adds words."""

    section: str  # "patterns", "state", "starts", "private", "performance", "security", "testing", "training"
    kind: str  # "async function", "torch.load", …
    text: str
    line: int
    note: str = ""
    weight: str = ""  # of a finding: "high", "medium" or "low"


class ModuleFacts(NamedTuple):
    """A class that may be an ``nn.Module``, with the attributes that its ``__init__`` makes."""

    name: str
    line: int
    base: str
    forward: str  # its signature, "" if it has none of its own
    forward_line: int
    parts: tuple[tuple[str, str, int], ...]  # attribute, constructor, line


class Option(NamedTuple):
    """A setting: a command line option, an environment variable, or a key of a configuration file."""

    kind: str  # "option", "environment", "key"
    name: str
    line: int
    default: str
    reads: tuple[int, ...]


class Keyword(NamedTuple):
    """An identifier or a word, the line that defines it (0 if none), and the other lines that use it."""

    name: str
    kind: str  # "class", "function", …, "name" (used, defined elsewhere), "word"
    line: int
    uses: tuple[int, ...]


class Facts(NamedTuple):
    """Everything that parsing one file gives, before other files are considered."""

    language: str
    parser: str  # "ast", "tree-sitter", "ctags", "keys", "words"
    problem: str = ""  # why the parser for its language was not used
    purpose: str = ""  # the first paragraph of ``doc``
    purpose_line: int = 0
    doc: str = ""  # the module's docstring, or the comment that the file opens with
    definitions: tuple[Definition, ...] = ()
    imports: tuple[Import, ...] = ()
    calls: tuple[Call, ...] = ()
    bases: tuple[Base, ...] = ()
    facts: tuple[Fact, ...] = ()
    modules: tuple[ModuleFacts, ...] = ()
    options: tuple[Option, ...] = ()
    subscripts: tuple[tuple[str, int], ...] = ()  # literal keys that are read
    exports: tuple[str, ...] = ()
    main_line: int = 0  # `if __name__ == "__main__"`
    mentions: tuple[str, ...] = ()  # names that docstrings and annotations mention; the pages link those that resolve


_LISTS: dict[str, Any] = {
    "definitions": Definition,
    "imports": Import,
    "calls": Call,
    "bases": Base,
    "facts": Fact,
    "modules": ModuleFacts,
    "options": Option,
    "subscripts": tuple,
}
_NESTED = (Definition, ModuleFacts, Option)  # their fields may be tuples


def pack(facts: Facts) -> str:
    return json.dumps(facts, ensure_ascii=True, separators=(",", ":"))


def unpack(text: str) -> Facts:
    """The inverse of ``pack``.

    Example:
        >>> facts = Facts("Python", "ast", bases=(Base("A", "nn.Module", 3),))
        >>> unpack(pack(facts)) == facts
        True
    """
    values = dict(zip(Facts._fields, json.loads(text), strict=True))
    for name, record in _LISTS.items():
        if record in _NESTED:
            values[name] = tuple([record._make(_frozen(item)) for item in values[name]])
        else:
            values[name] = tuple(map(tuple if record is tuple else record._make, values[name]))
    values["exports"], values["mentions"] = tuple(values["exports"]), tuple(values["mentions"])
    return Facts(**values)


def _frozen(item: list[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(value) if isinstance(value, list) else value for value in item)


def pack_keywords(keywords: list[Keyword]) -> str:
    return json.dumps(keywords, ensure_ascii=True, separators=(",", ":"))


def unpack_keywords(text: str) -> list[Keyword]:
    """The inverse of ``pack_keywords``."""
    return [Keyword(name, kind, line, tuple(uses)) for name, kind, line, uses in json.loads(text)]
