"""One pass over a Python file's tree: definitions, imports, calls, bases and every identifier with its lines.

One pass collects; names are given their meaning afterwards, since an import may stand below its use.
"""

from __future__ import annotations

import ast

from sternway.atlas._docstrings import documented_exceptions, first_paragraph
from sternway.atlas._identifiers import Identifiers, Use
from sternway.atlas._records import Definition, Import
from sternway.atlas._scopes import FALLBACK, UNKNOWN, Scope

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Reading(Identifiers):
    """What one pass over a module's tree has collected."""

    def __init__(self, tree: ast.Module, module: str, package: str) -> None:
        super().__init__()
        self.module, self.package = module, package
        self.definitions: list[Definition] = []
        self.imports: list[Import] = []
        self.docs: list[tuple[str, int]] = []  # docstrings with their first line
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, FunctionNode] = {}
        self.bodies: list[tuple[str, FunctionNode, Scope]] = []  # every function, also two of one name
        self.exports: tuple[str, ...] = ()
        self.main_line = 0
        self._typing = False
        self._doc(tree)
        self._all(tree.body, self.top)

    # -- meaning

    def absolute(self, node: ast.expr, scope: Scope) -> str:
        """The absolute dotted name of ``a.b.c``; empty where it cannot be told."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        owner = scope.method_owner(node.id) if len(attributes) == 1 else ""
        if owner:
            name = f"{owner}.{attributes[0]}"
            return f"{self.module}.{name}" if name in self.functions else ""
        meaning = scope.find(node.id)
        return ".".join([meaning, *reversed(attributes)]) if meaning else ""

    def _local(self, name: str) -> str:
        return f"{self.module}.{name}"

    # -- the pass

    def _assign(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node.value, ast.Call):
            self._targets[id(node.value)] = node
        for target in targets:
            if isinstance(target, ast.Name):
                self._variable(target, node, scope)
            else:
                self._visit(target, scope)
        if isinstance(node, ast.AnnAssign):
            self._visit(node.annotation, scope)
        if node.value is not None:
            self._visit(node.value, scope)

    def _variable(self, target: ast.Name, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        self._seen(target.id, target.lineno)
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        scope.bind(target.id, FALLBACK if is_none else UNKNOWN)
        self._bound(target.id, "variable", target.lineno)
        if target.id == "__all__" and scope is self.top and isinstance(node.value, ast.List | ast.Tuple):
            names = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
            self.exports = tuple(name for name in names if isinstance(name, str))
        elif scope is self.top or scope.is_class:
            name = f"{scope.name}.{target.id}" if scope.name else target.id
            hint = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
            end = node.end_lineno or node.lineno
            self.definitions.append(Definition(name, "variable", target.lineno, end, hint))

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            for part in alias.name.split("."):
                self._seen(part, alias.lineno)
            bound = alias.asname or alias.name.partition(".")[0]
            self._record_import(Import(node.lineno, alias.name, 0, "", bound, self._where(scope)))
            self._bind_import(alias, bound, alias.name if alias.asname else bound, scope)

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        base = absolute_module(node.module or "", node.level, self.package)
        for part in (node.module or "").split("."):
            if part:
                self._seen(part, node.lineno)
        for alias in node.names:
            bound = alias.asname or alias.name
            self._record_import(
                Import(node.lineno, node.module or "", node.level, alias.name, bound, self._where(scope))
            )
            if alias.name == "*":
                scope.star = True
                continue
            self._seen(alias.name, alias.lineno)
            self._bind_import(alias, bound, f"{base}.{alias.name}" if base is not None else UNKNOWN, scope)

    def _bind_import(self, alias: ast.alias, bound: str, meaning: str, scope: Scope) -> None:
        if alias.asname:
            self._seen(bound, alias.lineno)
        scope.bind(bound, meaning)
        self._bound(bound, "import", alias.lineno)

    def _record_import(self, record: Import) -> None:
        self.imports.append(record)

    def _where(self, scope: Scope) -> str:
        if self._typing:
            return "typing"
        while scope.is_class and scope.parent is not None:
            scope = scope.parent
        return "module" if scope is self.top else "function"

    def _if(self, node: ast.If, scope: Scope) -> None:
        self._visit(node.test, scope)
        if self.main_line == 0 and scope is self.top and _is_main_guard(node.test):
            self.main_line = node.lineno
        before = self._typing
        if isinstance(node.test, ast.Name | ast.Attribute):
            self._typing |= ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"
        self._all(node.body, scope)
        self._typing = before
        self._all(node.orelse, scope)

    def _function(self, node: FunctionNode, scope: Scope) -> None:
        name = f"{scope.name}.{node.name}" if scope.name else node.name
        kind = "method" if scope.is_class else "function"
        self._define(node, name, kind, scope)
        self.functions[name] = node
        arguments = [*node.args.posonlyargs, *node.args.args]
        static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
        self_name = arguments[0].arg if scope.is_class and arguments and not static else ""
        inner = Scope(name, scope, self_name=self_name)
        self._arguments(node.args, scope, inner)
        if node.returns is not None:
            self._visit(node.returns, scope)
        depth, self._depth = self._depth, 0
        self._all(node.body, inner)
        self._depth = depth
        self.bodies.append((name, node, inner))

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        name = f"{scope.name}.{node.name}" if scope.name else node.name
        self._define(node, name, "class", scope)
        self.classes[name] = node
        for base in node.bases:
            self.uses.append(Use("base", base, scope, node))
        self._all([*node.bases, *node.keywords], scope)
        self._all(node.body, Scope(name, scope, is_class=True))

    def _define(self, node: FunctionNode | ast.ClassDef, name: str, kind: str, scope: Scope) -> None:
        line = node.lineno
        self._seen(node.name, line)
        scope.bind(node.name, self._local(name))
        self._bound(node.name, kind, line)
        for decorator in node.decorator_list:
            self.uses.append(Use("decorator", decorator, scope, node))
            self._visit(decorator, scope)
        if isinstance(node, ast.ClassDef):
            inside = [ast.unparse(base) for base in node.bases] + [ast.unparse(word) for word in node.keywords]
            signature = f"({', '.join(inside)})" if inside else ""
        else:
            signature = f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
        text = self._doc(node)
        self.definitions.append(
            Definition(
                name,
                kind,
                line,
                node.end_lineno or line,
                signature,
                tuple(ast.unparse(item) for item in node.decorator_list),
                first_paragraph(text),
                isinstance(node, ast.AsyncFunctionDef),
                documented_exceptions(text),
            )
        )

    def _doc(self, node: ast.Module | ast.ClassDef | FunctionNode) -> str:
        text = ast.get_docstring(node)
        if text:
            self.docs.append((ast.get_docstring(node, clean=False) or "", node.body[0].lineno))
        return text or ""


Reading.methods = {
    ast.Name: Reading._name,
    ast.Attribute: Reading._attribute,
    ast.Call: Reading._call,
    ast.keyword: Reading._keyword,
    ast.Subscript: Reading._subscript,
    ast.Assign: Reading._assign,
    ast.AnnAssign: Reading._assign,
    ast.Import: Reading._import,
    ast.ImportFrom: Reading._import_from,
    ast.If: Reading._if,
    ast.For: Reading._loop,
    ast.AsyncFor: Reading._loop,
    ast.While: Reading._loop,
    ast.Yield: Reading._yield,
    ast.YieldFrom: Reading._yield,
    ast.Global: Reading._global,
    ast.Nonlocal: Reading._global,
    ast.ExceptHandler: Reading._captured,
    ast.MatchAs: Reading._captured,
    ast.MatchStar: Reading._captured,
    ast.MatchMapping: Reading._captured,
    ast.ListComp: Reading._comprehension,
    ast.SetComp: Reading._comprehension,
    ast.DictComp: Reading._comprehension,
    ast.GeneratorExp: Reading._comprehension,
    ast.Lambda: Reading._lambda,
    ast.FunctionDef: Reading._function,
    ast.AsyncFunctionDef: Reading._function,
    ast.ClassDef: Reading._class,
    ast.Constant: lambda *_: None,
    ast.Load: lambda *_: None,
    ast.Store: lambda *_: None,
}


def absolute_module(module: str, level: int, package: str) -> str | None:
    """The module that ``from ..module import`` means in ``package``; None if it climbs too far.

    Example:
        >>> absolute_module("graph", 2, "a.b.c"), absolute_module("", 1, "a"), absolute_module("x", 0, "a")
        ('a.b.graph', 'a', 'x')
    """
    if not level:
        return module
    parts = package.split(".") if package else []
    if level - 1 > len(parts) or not parts:
        return None
    parts = parts[: len(parts) - (level - 1)]
    return ".".join([*parts, module] if module else parts)


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and test.left.id == "__name__"
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value == "__main__"
    )
