"""Command line options and environment variables of a Python file, and where each is read."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from sternway.atlas._records import Option
from sternway.atlas.python._patterns import shortened
from sternway.atlas.python._reading import Reading

_DECLARED = {"click.option", "click.argument", "typer.Option", "typer.Argument"}


def find(reading: Reading) -> Iterator[Option]:
    """Options in the order of their lines, then environment variables."""
    reads = _reads(reading)
    environment: dict[str, list[int]] = defaultdict(list)
    for use in reading.uses:
        node = use.node
        if use.kind == "call" and isinstance(node, ast.Call):
            name = reading.absolute(node.func, use.scope)
            declared = isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
            if declared or name in _DECLARED:
                yield from _option(node, reads)
            elif name in ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop"):
                _add(environment, node.args[0] if node.args else None, node.lineno)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice if reading.absolute(node.value, use.scope) == "os.environ" else None
            _add(environment, key, node.lineno)
    for name, lines in sorted(environment.items()):
        yield Option("environment", name, lines[0], "", tuple(lines))


def _add(environment: dict[str, list[int]], key: ast.expr | None, line: int) -> None:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        environment[key.value].append(line)


def _option(node: ast.Call, reads: dict[str, list[int]]) -> Iterator[Option]:
    names = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if not names or any(" " in name for name in names):
        return
    longest = max(names, key=lambda name: (name.startswith("--"), len(name)))
    destination = longest.lstrip("-").replace("-", "_")
    if isinstance(stated := given.get("dest"), ast.Constant) and isinstance(stated.value, str):
        destination = stated.value
    default = shortened(given["default"], 40) if "default" in given else ""
    yield Option("option", ", ".join(names), node.lineno, default, tuple(reads.get(destination, ())))


def _reads(reading: Reading) -> dict[str, list[int]]:
    """Where ``args.name`` is read, for each name that is assigned from ``parse_args()`` in the same file."""
    holders = set()
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call) and isinstance(use.statement, ast.Assign):
            method = use.node.func.attr if isinstance(use.node.func, ast.Attribute) else ""
            target = use.statement.targets[0]
            if method == "parse_known_args" and isinstance(target, ast.Tuple) and target.elts:
                target = target.elts[0]
            if method in ("parse_args", "parse_known_args") and isinstance(target, ast.Name):
                holders.add(target.id)
    found: dict[str, list[int]] = defaultdict(list)
    for use in reading.uses:
        node = use.node
        if use.kind == "attribute" and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            lines = found[node.attr] if node.value.id in holders else [node.lineno]
            if node.lineno not in lines:
                lines.append(node.lineno)
    return found


def subscripts(reading: Reading) -> Iterator[tuple[str, int]]:
    """Literal string keys that are read: ``x["key"]`` and ``x.get("key")``."""
    for use in reading.uses:
        node = use.node
        if use.kind == "subscript" and isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            assert isinstance(node.slice, ast.Constant)
            yield str(node.slice.value), node.lineno
        elif use.kind == "call" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first = node.args[0] if node.args else None
            if node.func.attr == "get" and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, node.lineno
