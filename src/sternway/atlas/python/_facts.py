"""The facts of a Python file, by ``ast``, before other files are considered."""

from __future__ import annotations

import ast
import functools
import warnings

from sternway.atlas._records import Base, Call, Definition, Facts, Keyword
from sternway.atlas.python import _design, _options, _patterns, _performance, _security, _training
from sternway.atlas.python._docstrings import first_paragraph
from sternway.atlas.python._lexer import comments
from sternway.atlas.python._pass import read_tree
from sternway.atlas.python._reading import Reading
from sternway.atlas.read._words import WordIndex


def read_python(text: str, module: str, package: str) -> tuple[Facts, list[Keyword]]:
    """Facts and keywords of a Python file; raises SyntaxError, ValueError or RecursionError as ``ast.parse`` does.

    Args:
        text: the source.
        module: its absolute name.
        package: where relative imports start: the module itself for an ``__init__.py``, else its parent.
    """
    tree = parse(text)
    reading = read_tree(tree, module, package)
    finders = (_patterns, _design, _performance, _security, _training)
    found = {fact for finder in finders for fact in finder.find(reading)}
    doc = ast.get_docstring(tree) or ""
    facts = plain_facts(reading)._replace(
        purpose=first_paragraph(doc),
        purpose_line=tree.body[0].lineno if doc else 0,
        doc=doc,
        facts=tuple(sorted(found, key=lambda fact: (fact.section, fact.kind, fact.line, fact.text))),
        modules=tuple(_training.modules(reading)),
        options=tuple(_options.find(reading)),
        subscripts=tuple(_options.subscripts(reading)),
    )
    return facts, _keywords(reading, text)


def _keywords(reading: Reading, text: str) -> list[Keyword]:
    words = WordIndex()
    for doc, line in reading.docs:
        words.add(doc, line)
    for comment, line in comments(text):
        words.add(comment, line)
    return words.keywords(reading.lines, reading.kinds)


def parse(text: str) -> ast.Module:
    """The syntax tree, without the warnings that the source itself causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def plain_facts(reading: Reading) -> Facts:
    """Definitions, imports, calls and bases; patterns and training facts are added afterwards."""
    calls, bases = [], []
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call):
            name = reading.absolute(use.node.func, use.scope)
            if name and not name.startswith("builtins."):
                calls.append(Call(name, use.node.lineno, use.scope.name, *use.lines, use.loop))
        elif use.kind == "base" and isinstance(use.statement, ast.ClassDef):
            owner = f"{use.scope.name}.{use.statement.name}" if use.scope.name else use.statement.name
            name = reading.absolute(_unsubscripted(use.node), use.scope)
            bases.append(Base(owner, name or "?" + ast.unparse(use.node), use.node.lineno))
    return Facts(
        "Python",
        "ast",
        definitions=tuple(sorted(map(functools.partial(_with_outcomes, reading), reading.definitions), key=_line)),
        imports=tuple(reading.imports),
        calls=tuple(calls),
        bases=tuple(bases),
        exports=reading.exports,
        main_line=reading.main_line,
        mentions=tuple(sorted(reading.mentions)),
    )


def _with_outcomes(reading: Reading, item: Definition) -> Definition:
    """A function with what it raises and, if it has no docstring, with what it returns."""
    if item.kind not in ("function", "method"):
        return item
    raised = [name for name in reading.raised.get(item.name, ()) if name.rpartition(".")[2][:1].isupper()]
    returned = () if item.doc or " -> " in item.signature else reading.returned.get(item.name, ())
    return item._replace(returns=tuple(returned), raises=tuple(raised))


def _line(item: Definition) -> int:
    return item.line


def _unsubscripted(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Subscript) else node
