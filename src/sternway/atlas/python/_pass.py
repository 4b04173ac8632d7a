"""One pass over a Python file's syntax tree, which fills a ``Reading``.

Each node type has a method; ``_METHODS`` at the end is the table. A type without one has its children visited.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from sternway.atlas.python._bind import NameBinder
from sternway.atlas.python._define import annotated, defined, field, field_docs, given_doc, noted, text_of
from sternway.atlas.python._reading import FunctionNode, Reading, Use
from sternway.atlas.python._scopes import FALLBACK, UNKNOWN, Scope


def read_tree(tree: ast.Module, module: str, package: str) -> Reading:
    """Collect everything from a module's tree."""
    reading = Reading(module, package)
    visitor = _Pass(reading)
    visitor.doc(tree)
    visitor.all(tree.body, reading.top)
    field_docs(reading, tree)
    return reading


class _Pass(NameBinder):
    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)
        self._uses = reading.uses
        self._loop_line = 0  # of the innermost loop
        self._at = (0, 0)  # the lines of the simple statement
        self._targets: dict[int, ast.AST] = {}  # the assignment around a call

    def all(self, nodes: list[Any], scope: Scope) -> None:
        for node in nodes:
            self._visit(node, scope)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        method = _METHODS.get(type(node))
        if method is not None:
            method(self, node, scope)
        else:
            self._children(node, scope)

    def _children(self, node: ast.AST, scope: Scope) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                self._visit(value, scope)
            elif isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        self._visit(item, scope)

    # -- expressions

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
            self._uses.append(Use("attribute", node, scope, node, self._loop_line, self._at))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        self._uses.append(Use("call", node, scope, self._targets.get(id(node), node), self._loop_line, self._at))
        self._children(node, scope)

    def _compare(self, node: ast.Compare, scope: Scope) -> None:
        if self._loop_line and isinstance(node.ops[0], ast.In | ast.NotIn):
            self.reading.membership.append((node, scope, self._loop_line))
        self._children(node, scope)

    def _keyword(self, node: ast.keyword, scope: Scope) -> None:
        if node.arg:
            self._seen(node.arg, node.lineno)
        self._visit(node.value, scope)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self._uses.append(Use("subscript", node, scope, node))
        if isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load):
            self._uses.append(Use("stored", node, scope, self._targets.get(id(node), node)))
        self._children(node, scope)

    def _yield(self, node: ast.Yield | ast.YieldFrom, scope: Scope) -> None:
        self.reading.yields.setdefault(scope, node.lineno)
        self._children(node, scope)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: Scope) -> None:
        inner, before = Scope(scope.name, scope), self._loop_line
        for part in node.generators:
            self._visit(part.iter, inner)  # the first is evaluated once, the others each time round
            self._loop_line = node.lineno
            self._visit(part.target, inner)
            self.all(part.ifs, inner)
        if isinstance(node, ast.DictComp):
            self.all([node.key, node.value], inner)
        else:
            self._visit(node.elt, inner)
        self._loop_line = before

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
                annotated(self.reading, argument.annotation)
                self._visit(argument.annotation, outer)
        self.all([*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)], outer)

    # -- statements

    def _plain(self, node: ast.stmt, scope: Scope) -> None:
        self._at = (node.lineno, node.end_lineno or node.lineno)
        self._children(node, scope)

    def _head(self, node: Any, scope: Scope) -> None:
        """A compound statement: a call in its head has no statement that could be quoted whole."""
        self._at = (0, 0)
        self._children(node, scope)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, scope: Scope) -> None:
        self._at = (0, 0)
        before = self._loop_line
        if isinstance(node, ast.While):
            self._loop_line = node.lineno
            self._visit(node.test, scope)
        else:
            self._visit(node.iter, scope)
            self._loop_line = node.lineno
            self._visit(node.target, scope)
        self.all(node.body, scope)
        self._loop_line = before
        self.all(node.orelse, scope)

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        if self._loop_line and isinstance(node.op, ast.Add):
            self.reading.growing.append((node, scope, self._loop_line))
        self._plain(node, scope)

    def _return(self, node: ast.Return, scope: Scope) -> None:
        if node.value is not None:
            noted(self.reading.returned, scope.name, node.value)
        self._plain(node, scope)

    def _raise(self, node: ast.Raise, scope: Scope) -> None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Name | ast.Attribute):
            noted(self.reading.raised, scope.name, raised)
        self._plain(node, scope)

    def _global(self, node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
        for name in node.names:
            self._seen(name, node.lineno)
            if isinstance(node, ast.Nonlocal):
                scope.bind(name)
            else:
                scope.declare_global(name)
                self.reading.top.bind(name)
                self.reading.globals.append((name, node.lineno))

    def _captured(self, node: ast.AST, scope: Scope) -> None:
        """``except E as name``, ``case [*name]`` and similar."""
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(name, str):
            self._seen(name, node.lineno)  # type: ignore[attr-defined]  # all of these have one
            scope.bind(name)
            self._bound(name, "variable", node.lineno)  # type: ignore[attr-defined]
        self._children(node, scope)

    def _if(self, node: ast.If, scope: Scope) -> None:
        self._at = (0, 0)
        self._visit(node.test, scope)
        if self.reading.main_line == 0 and scope is self.reading.top and _is_main_guard(node.test):
            self.reading.main_line = node.lineno
        before = self._typing
        if isinstance(node.test, ast.Name | ast.Attribute):
            self._typing |= ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        self.all(node.body, scope)
        self._typing = before
        self.all(node.orelse, scope)

    def _assign(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        self._at = (node.lineno, node.end_lineno or node.lineno)
        if isinstance(node.value, ast.Call):
            self._targets[id(node.value)] = node
        for target in targets:
            if isinstance(target, ast.Subscript):
                self._targets[id(target)] = node
        if self._loop_line and isinstance(node, ast.Assign) and len(targets) == 1:
            self.reading.growing.append((node, scope, self._loop_line))
        for target in targets:
            if isinstance(target, ast.Name):
                self._variable(target, node, scope)
            else:
                self._visit(target, scope)
                if isinstance(target, ast.Attribute) and target.attr == "__doc__" and scope is self.reading.top:
                    given_doc(self.reading, target, node)
        if isinstance(node, ast.AnnAssign):
            annotated(self.reading, node.annotation)
            self._visit(node.annotation, scope)
        if node.value is not None:
            self._visit(node.value, scope)

    def _variable(self, target: ast.Name, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        self._seen(target.id, target.lineno)
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        scope.bind(target.id, FALLBACK if is_none else UNKNOWN)
        self._bound(target.id, "variable", target.lineno)
        at_top = scope is self.reading.top
        if target.id == "__all__" and at_top and isinstance(node.value, ast.List | ast.Tuple):
            names = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
            self.reading.exports = tuple(name for name in names if isinstance(name, str))
        elif at_top or scope.is_class:
            self.reading.definitions.append(field(scope.inner(target.id), target, node))
        if at_top and node.value is not None:
            self.reading.assigned[target.id] = node.value
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.reading.strings.append((target.id, node.value, scope))

    # -- definitions

    def _function(self, node: FunctionNode, scope: Scope) -> None:
        name = self._define(node, "method" if scope.is_class else "function", scope)
        self.reading.functions[name] = node
        arguments = [*node.args.posonlyargs, *node.args.args]
        static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
        self_name = arguments[0].arg if scope.is_class and arguments and not static else ""
        inner = Scope(name, scope, self_name=self_name)
        self._arguments(node.args, scope, inner)
        if node.returns is not None:
            annotated(self.reading, node.returns)
            self._visit(node.returns, scope)
        before, self._loop_line = self._loop_line, 0
        self.all(node.body, inner)
        self._loop_line = before
        self.reading.bodies.append((name, node, inner))

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        name = self._define(node, "class", scope)
        self.reading.classes[name] = node
        for base in node.bases:
            self._uses.append(Use("base", base, scope, node))
        self.all([*node.bases, *node.keywords], scope)
        self.all(node.body, Scope(name, scope, is_class=True))
        field_docs(self.reading, node, name)

    def _define(self, node: FunctionNode | ast.ClassDef, kind: str, scope: Scope) -> str:
        """Record a definition; its dotted name in the file."""
        name, line = scope.inner(node.name), node.lineno
        self._seen(node.name, line)
        scope.bind(node.name, f"{self.reading.module}.{name}")
        self._bound(node.name, kind, line)
        for decorator in node.decorator_list:
            self._at = (0, 0)
            self._uses.append(Use("decorator", decorator, scope, node))
            self._visit(decorator, scope)
        self._at = (0, 0)
        self.reading.definitions.append(defined(node, name, kind, self.doc(node)))
        return name

    def doc(self, node: ast.Module | ast.ClassDef | FunctionNode) -> str:
        """Record a docstring; its cleaned text."""
        text = text_of(node)
        if text:
            self.reading.documented(text, ast.get_docstring(node, clean=False) or "", node.body[0].lineno)
        return text


_METHODS: dict[type, Any] = {
    ast.Name: _Pass._name,
    ast.Attribute: _Pass._attribute,
    ast.Call: _Pass._call,
    ast.keyword: _Pass._keyword,
    ast.Subscript: _Pass._subscript,
    ast.Lambda: _Pass._lambda,
    ast.Compare: _Pass._compare,
    ast.Assign: _Pass._assign,
    ast.AugAssign: _Pass._augmented,
    ast.Return: _Pass._return,
    ast.Raise: _Pass._raise,
    ast.AnnAssign: _Pass._assign,
    ast.Import: _Pass._import,
    ast.ImportFrom: _Pass._import_from,
    ast.If: _Pass._if,
    ast.FunctionDef: _Pass._function,
    ast.AsyncFunctionDef: _Pass._function,
    ast.ClassDef: _Pass._class,
    **dict.fromkeys((ast.Yield, ast.YieldFrom), _Pass._yield),
    **dict.fromkeys((ast.Expr, ast.Assert, ast.Delete), _Pass._plain),
    **dict.fromkeys((ast.With, ast.AsyncWith, ast.Match), _Pass._head),
    **dict.fromkeys((ast.For, ast.AsyncFor, ast.While), _Pass._loop),
    **dict.fromkeys((ast.Global, ast.Nonlocal), _Pass._global),
    **dict.fromkeys((ast.ExceptHandler, ast.MatchAs, ast.MatchStar, ast.MatchMapping), _Pass._captured),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), _Pass._comprehension),
    **dict.fromkeys((ast.Constant, ast.Load, ast.Store), lambda *_: None),
}


def _parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args)
    if arguments.vararg:
        yield arguments.vararg
    yield from arguments.kwonlyargs
    if arguments.kwarg:
        yield arguments.kwarg


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == "__main__"
    )
