"""Every identifier of a Python tree with its lines, and every expression whose meaning is looked up later."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from sternway.atlas._scopes import Scope


class Use(NamedTuple):
    """An expression whose meaning is looked up after the pass."""

    kind: str  # "call", "decorator", "base", "subscript", "attribute"
    node: ast.expr
    scope: Scope
    statement: ast.AST  # the definition or the assignment around, where that matters


class Identifiers:
    """One pass over a tree, by the type of its nodes; ``Reading`` adds imports and definitions."""

    methods: ClassVar[dict[type, Any]] = {}  # node type → method

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.lines: dict[str, list[int]] = {}  # every identifier
        self.kinds: dict[str, tuple[str, int]] = {}  # those bound here: kind and defining line
        self.loops: list[tuple[int, int]] = []  # depth, line
        self.yields: dict[Scope, int] = {}  # the first line in each function that yields
        self.top = Scope("", None)
        self._depth = 0
        self._targets: dict[int, ast.AST] = {}

    def _all(self, nodes: list[Any], scope: Scope) -> None:
        for node in nodes:
            self._visit(node, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        method = self.methods.get(type(node))
        if method is not None:
            method(self, node, scope)
        else:
            self._children(node, scope)

    def _children(self, node: ast.AST, scope: Scope) -> None:
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, ast.AST):
                self._visit(value, scope)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        self._visit(item, scope)

    def _seen(self, name: str, line: int) -> None:
        lines = self.lines.get(name)
        if lines is None:
            self.lines[name] = [line]
        elif lines[-1] != line:
            lines.append(line)

    def _bound(self, name: str, kind: str, line: int) -> None:
        if name not in self.kinds or (self.kinds[name][0] == "parameter" and kind != "parameter"):
            self.kinds[name] = (kind, line)

    def _name(self, node: ast.Name, scope: Scope) -> None:
        self._seen(node.id, node.lineno)
        if not isinstance(node.ctx, ast.Load):
            scope.bind(node.id)
            self._bound(node.id, "variable", node.lineno)

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        self._visit(node.value, scope)
        line = node.end_lineno or node.lineno
        self._seen(node.attr, line)
        if isinstance(node.ctx, ast.Store):
            self._bound(node.attr, "attribute", line)
        else:
            self.uses.append(Use("attribute", node, scope, node))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        self.uses.append(Use("call", node, scope, self._targets.get(id(node), node)))
        self._children(node, scope)

    def _keyword(self, node: ast.keyword, scope: Scope) -> None:
        if node.arg:
            self._seen(node.arg, node.lineno)
        self._visit(node.value, scope)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self.uses.append(Use("subscript", node, scope, node))
        self._children(node, scope)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope) -> None:
        self._depth += 1
        self.loops.append((self._depth, node.lineno))
        self._children(node, scope)
        self._depth -= 1

    def _yield(self, node: ast.Yield | ast.YieldFrom, scope: Scope) -> None:
        self.yields.setdefault(scope, node.lineno)
        self._children(node, scope)

    def _global(self, node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
        for name in node.names:
            self._seen(name, node.lineno)
            scope.bind(name)
            if isinstance(node, ast.Global):
                self.top.bind(name)

    def _captured(self, node: ast.AST, scope: Scope) -> None:
        """``except E as name``, ``case [*name]`` and the like."""
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(name, str):
            self._seen(name, node.lineno)  # type: ignore[attr-defined]  # all of these have one
            scope.bind(name)
            self._bound(name, "variable", node.lineno)  # type: ignore[attr-defined]
        self._children(node, scope)

    def _comprehension(self, node: ast.expr, scope: Scope) -> None:
        self._children(node, Scope(scope.name, scope))

    def _lambda(self, node: ast.Lambda, scope: Scope) -> None:
        inner = Scope(scope.name, scope)
        self._arguments(node.args, scope, inner)
        self._visit(node.body, inner)

    def _arguments(self, arguments: ast.arguments, outer: Scope, inner: Scope) -> None:
        for argument in _parameters(arguments):
            self._seen(argument.arg, argument.lineno)
            inner.bind(argument.arg)
            self._bound(argument.arg, "parameter", argument.lineno)
            if argument.annotation is not None:
                self._visit(argument.annotation, outer)
        self._all([*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)], outer)


def _parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args)
    if arguments.vararg:
        yield arguments.vararg
    yield from arguments.kwonlyargs
    if arguments.kwarg:
        yield arguments.kwarg
