"""The record of one definition: its signature, docstring, decorators, and what its statements return and raise."""

from __future__ import annotations

import ast
import inspect
import itertools
import re

from sternway.atlas._records import Definition
from sternway.atlas.python._reading import FunctionNode, Reading

_LONGEST = 60  # characters of a value or a returned expression that are shown
_MOST = 4  # returned expressions of one function


def defined(node: FunctionNode | ast.ClassDef, name: str, kind: str, doc: str) -> Definition:
    """The record of a class or a function."""
    if isinstance(node, ast.ClassDef):
        inside = [ast.unparse(base) for base in node.bases] + [ast.unparse(word) for word in node.keywords]
        signature = f"({', '.join(inside)})" if inside else ""
    else:
        signature = f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    return Definition(
        name,
        kind,
        node.lineno,
        node.end_lineno or node.lineno,
        signature,
        tuple(ast.unparse(item) for item in node.decorator_list),
        doc,
        node.body[0].lineno if doc else 0,
        isinstance(node, ast.AsyncFunctionDef),
    )


def field(name: str, target: ast.Name, node: ast.Assign | ast.AnnAssign) -> Definition:
    """The record of a variable of a module or a class."""
    hint = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value = short(node.value) if node.value is not None else ""
    return Definition(name, "variable", target.lineno, node.end_lineno or node.lineno, hint, value=value)


def short(node: ast.expr) -> str:
    """An expression as code, where it is short; else empty. Long literals are not even written out."""
    if isinstance(node, ast.Dict | ast.List | ast.Set | ast.Tuple | ast.JoinedStr) and node.end_lineno != node.lineno:
        return ""
    if (node.end_col_offset or 0) - node.col_offset > _LONGEST + 20 or node.end_lineno != node.lineno:
        return ""
    text = ast.unparse(node)
    return text if len(text) <= _LONGEST else ""


def noted(found: dict[str, list[str]], name: str, node: ast.expr) -> None:
    """Add an expression to what a function returns or raises, once."""
    texts = found.setdefault(name, [])
    if len(texts) < _MOST and (text := short(node)) and text not in texts:
        texts.append(text)


def annotated(reading: Reading, node: ast.expr) -> None:
    """Note the names in an annotation, which pages link to their definitions."""
    if isinstance(node, ast.Name):
        reading.mentions[node.id] = None
    elif isinstance(node, ast.Attribute):
        reading.mentions[ast.unparse(node)] = None
    elif not isinstance(node, ast.Constant):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                annotated(reading, child)


def text_of(node: ast.Module | ast.ClassDef | FunctionNode) -> str:
    """A docstring without its indentation; empty if there is none."""
    return ast.get_docstring(node) or ""


def given_doc(reading: Reading, target: ast.Attribute, node: ast.Assign | ast.AnnAssign) -> None:
    """``Name.__doc__ = "…"`` documents a class or a function that has no docstring; only its literal text is known."""
    raw = re.sub(r"\n[ \t]*\0[ \t]*(?=\n)", "", _literal(node.value)).replace("\0", "…")
    text, name = inspect.cleandoc(raw), ast.unparse(target.value)
    for index, item in enumerate(reading.definitions):
        if text and item.name == name and item.kind != "variable" and not item.doc:
            reading.definitions[index] = item._replace(doc=text, doc_line=node.lineno)
            reading.documented(text, "", node.lineno)  # the lines of a text that is put together are not known


def _literal(node: ast.expr | None) -> str:
    """The literal parts of a text that is put together; a zero byte stands for each of the others."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\0"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _literal(node.left) + _literal(node.right)
    return "\0"


def field_docs(reading: Reading, node: ast.Module | ast.ClassDef, owner: str = "") -> None:
    """A string right below an assignment documents the name; after an empty line it may be meant for the next."""
    for before, after in itertools.pairwise(node.body):
        target = before.target if isinstance(before, ast.AnnAssign) else None
        if isinstance(before, ast.Assign) and len(before.targets) == 1:
            target = before.targets[0]  # type: ignore[assignment]  # any expression; a name is wanted
        if not isinstance(target, ast.Name) or not isinstance(after, ast.Expr):
            continue
        if after.lineno != (before.end_lineno or before.lineno) + 1:
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            name = f"{owner}.{target.id}" if owner else target.id
            text = inspect.cleandoc(after.value.value)
            reading.documented(text, after.value.value, after.lineno)
            for index, item in enumerate(reading.definitions):
                if item.name == name and item.line == target.lineno:
                    reading.definitions[index] = item._replace(doc=text, doc_line=after.lineno)
