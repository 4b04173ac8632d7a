"""Findings on performance in a Python file: work inside loops that grows or waits, and blocking calls in async code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sternway.atlas._records import Fact
from sternway.atlas.python._patterns import shortened
from sternway.atlas.python._reading import Reading, Use
from sternway.atlas.python._scopes import Scope

_SYNCHRONIZES = {"item": "medium", "tolist": "low", "cpu": "medium", "numpy": "low"}
_WAITS = ("torch.cuda.synchronize", "torch.accelerator.synchronize", "torch.mps.synchronize")
_ALLOCATES = re.compile(r"(torch|numpy)\.(zeros|ones|empty|full|rand|randn|arange|linspace|eye|tensor)(_like)?$")
_JOINS = re.compile(
    r"(torch\.(cat|concat|hstack|vstack|stack)|numpy\.(concatenate|append|hstack|vstack)|pandas\.concat)$"
)
_REPEATED = {
    "re.compile": "compiles the same pattern each time round",
    "copy.deepcopy": "copies the whole object each time round",
    "gc.collect": "collects garbage each time round",
    "torch.cuda.empty_cache": "empties the allocator's cache each time round",
}
_BLOCKS = re.compile(
    r"(time\.sleep|builtins\.input|os\.system|subprocess\.(run|call|check_call|check_output)"
    r"|requests\.(get|post|put|delete|patch|head|request)|urllib\.request\.urlopen|socket\.create_connection)$"
)


def find(reading: Reading) -> Iterator[Fact]:
    torch = reading.is_of_torch
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call):
            name = reading.absolute(use.node.func, use.scope)
            function = reading.functions.get(use.scope.name)
            if isinstance(function, ast.AsyncFunctionDef) and _BLOCKS.match(name):
                called = name.removeprefix("builtins.")
                note = f"{called} blocks the event loop in {use.scope.name}"
                yield _found("blocking call in async code", use.node, use.node.lineno, note, "high")
            if use.loop:
                yield from _in_loop(use, use.node, name, torch)
    for node, scope, loop in reading.growing:
        yield from _growing(reading, node, scope, loop)
    for compare, scope, loop in reading.membership:
        yield from _membership(reading, compare, scope, loop)


def _found(kind: str, node: ast.expr, line: int, note: str, weight: str) -> Fact:
    return Fact("performance", kind, shortened(node), line, note, weight)


def _in_loop(use: Use, node: ast.Call, name: str, torch: bool) -> Iterator[Fact]:
    where = f"in the loop at line {use.loop}"
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    bare = not node.args and not node.keywords
    if torch and bare and not name and method in _SYNCHRONIZES:
        note = f"{where}; on a device tensor, the host waits each time round"
        yield _found("device synchronization in a loop", node, node.lineno, note, _SYNCHRONIZES[method])
    elif name in _WAITS:
        note = f"{where}; the host waits each time round"
        yield _found("device synchronization in a loop", node, node.lineno, note, "high")
    elif name in _REPEATED:
        yield _found("repeated work in a loop", node, node.lineno, f"{where}; {_REPEATED[name]}", "low")
    elif _ALLOCATES.match(name):
        yield _found("allocation in a loop", node, node.lineno, where, "low")
    elif not name and _at_the_front(method, node.args):
        note = f"{where}; moves every element of a list each time round"
        yield _found("quadratic: at the front of a list", node, node.lineno, note, "medium")


def _at_the_front(method: str, arguments: list[ast.expr]) -> bool:
    """Whether a call is ``pop(0)`` or ``insert(0, x)``."""
    if len(arguments) != {"pop": 1, "insert": 2}.get(method):
        return False
    first = arguments[0]
    return isinstance(first, ast.Constant) and first.value == 0 and first.value is not False


def _growing(reading: Reading, node: ast.Assign | ast.AugAssign, scope: Scope, loop: int) -> Iterator[Fact]:
    """``x = torch.cat([x, …])``: everything so far is copied each time round."""
    if isinstance(node, ast.AugAssign) or not isinstance(node.targets[0], ast.Name):
        return
    target, value = node.targets[0].id, node.value
    if isinstance(value, ast.Call) and _JOINS.match(reading.absolute(value.func, scope)) and value.args:
        parts = value.args[0].elts if isinstance(value.args[0], ast.List | ast.Tuple) else value.args[:1]
        if any(isinstance(part, ast.Name) and part.id == target for part in parts):
            note = f"in the loop at line {loop}; copies everything so far each time round"
            yield _found("quadratic: grows by copying", value, value.lineno, note, "high")


def _membership(reading: Reading, node: ast.Compare, scope: Scope, loop: int) -> Iterator[Fact]:
    """``x in names``, where ``names`` is a list of the module that is written out."""
    right = node.comparators[0]
    if not isinstance(right, ast.Name) or scope.binder(right.id) is not reading.top:
        return
    value = reading.assigned.get(right.id)
    if isinstance(value, ast.List) and len(value.elts) > 8:
        note = f"in the loop at line {loop}; {right.id} is a list of {len(value.elts)}, searched from its start"
        yield _found("linear search in a loop", node, node.lineno, note, "low")
