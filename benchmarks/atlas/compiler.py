"""One Python file as the compiler sees it: every node with its owner, and names by Python's own symbol tables."""

from __future__ import annotations

import ast
import symtable
import warnings
from collections import defaultdict
from collections.abc import Iterator

Functions = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


class File:
    """One module: its tree, and its names' meanings by scope."""

    def __init__(self, path: str, module: str, package: str, text: str) -> None:
        self.path, self.module, self.package, self.text = path, module, package, text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text)
            self.table = symtable.symtable(text, path, "exec")
        self.owners: dict[ast.AST, tuple[str, symtable.SymbolTable, ast.AST | None]] = {}
        self.bindings: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))  # by table
        self.parents: dict[int, symtable.SymbolTable] = {}
        self.nones: set[int] = set()
        self._scope(self.tree, "", self.table, None)
        guards = [one for one in ast.walk(self.tree) if isinstance(one, ast.If) and _is_typing(one.test)]
        self.typing = {node for one in guards for part in one.body for node in ast.walk(part)}

    def _scope(self, node: ast.AST, name: str, table: symtable.SymbolTable, function: ast.AST | None) -> None:
        """Give every node below its qualified owner and its symbol table."""
        children: dict[tuple[str, int], list[symtable.SymbolTable]] = defaultdict(list)
        for child in table.get_children():
            children[child.get_name(), child.get_lineno()].append(child)
        for child in _body(node):
            self._node(child, name, table, children, function)

    def _node(
        self,
        node: ast.AST,
        name: str,
        table: symtable.SymbolTable,
        children: dict[tuple[str, int], list[symtable.SymbolTable]],
        function: ast.AST | None,
    ) -> None:
        self.owners[node] = (name, table, function)
        self._bind(node, name, table)
        if not isinstance(node, _SCOPES):
            for child in ast.iter_child_nodes(node):
                self._node(child, name, table, children, function)
            return
        for child in _outside(node):
            self._node(child, name, table, children, function)
        wanted = getattr(
            node,
            "name",
            {
                "Lambda": "lambda",
                "ListComp": "listcomp",
                "SetComp": "setcomp",
                "DictComp": "dictcomp",
                "GeneratorExp": "genexpr",
            }.get(type(node).__name__, ""),
        )
        lines = {node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))}  # type: ignore[attr-defined]
        waiting = next((children[wanted, line] for line in sorted(lines) if children.get((wanted, line))), None)
        if not waiting:
            if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):  # since Python 3.13 in the scope around it
                for child in _body(node):
                    self._node(child, name, table, children, function)
            return
        inner = waiting.pop(0)
        self.parents[inner.get_id()] = table
        qualified = f"{name}.{wanted}" if name and hasattr(node, "name") else wanted if hasattr(node, "name") else name
        self._scope(node, qualified, inner, node if isinstance(node, Functions) else function)

    def _bind(self, node: ast.AST, name: str, table: symtable.SymbolTable) -> None:
        found = self.bindings[table.get_id()]
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]].add(
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, self.package)
            for alias in node.names:
                found[alias.asname or alias.name].add(f"{base}.{alias.name}" if base else "")
        elif isinstance(node, Functions | ast.ClassDef):
            found[node.name].add(f"{self.module}.{name + '.' if name else ''}{node.name}")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id].add("None" if id(node) in self.nones else "")
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found[node.name].add("")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None:
            self.nones.update(map(id, node.targets))  # what a failed import leaves
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant) and node.value.value is None:
            self.nones.add(id(node.target))

    def meaning(self, node: ast.expr) -> str:
        """The absolute name of an expression, by the compiler's scopes."""
        parts = []
        at: ast.expr = node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if not isinstance(at, ast.Name) or at not in self.owners:
            return ""
        _, table, _ = self.owners[at]
        found = self._lookup(at.id, table)
        return ".".join([found, *reversed(parts)]) if found else ""

    def _lookup(self, name: str, table: symtable.SymbolTable) -> str:
        try:
            symbol = table.lookup(name)
        except KeyError:
            return ""
        if symbol.is_global():
            scope: symtable.SymbolTable = self.table
        elif symbol.is_free():
            scope = table
            while True:
                scope = self.parents[scope.get_id()]
                if scope.get_type() == "function" and name in scope.get_identifiers() and scope.lookup(name).is_local():
                    break
        else:
            scope = table
        if scope is not self.table and scope.lookup(name).is_parameter():
            return ""  # it may be what was passed
        meanings = self.bindings[scope.get_id()].get(name, set())
        if not meanings:
            return f"builtins.{name}" if scope is self.table and not self.bindings[scope.get_id()].get("*") else ""
        meanings = meanings - {"None"}
        return next(iter(meanings)) if len(meanings) == 1 else ""

    def at_import(self, node: ast.AST) -> bool:
        """Whether a statement runs when the module is imported: in no function, and not for type checkers only."""
        if self.owners[node][2] is not None:
            return False
        return node not in self.typing

    def own_method(self, node: ast.Call) -> str:
        """``self.method()``: the method's name, where the class around defines one."""
        called = node.func
        if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
            return ""
        name, function = called.value.id, self.owners[node][2]
        while isinstance(function, Functions):
            arguments = [*function.args.posonlyargs, *function.args.args]
            owner, table, around = self.owners[function]
            if any(argument.arg == name for argument in _all_arguments(function.args)):
                static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
                is_self = table.get_type() == "class" and arguments and arguments[0].arg == name and not static
                return f"{owner}.{called.attr}" if is_self else ""
            function = around
        return ""


def _is_typing(test: ast.expr) -> bool:
    return isinstance(test, ast.Name | ast.Attribute) and ast.unparse(test).rpartition(".")[2] == "TYPE_CHECKING"


def _all_arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (one for one in (arguments.vararg, arguments.kwarg) if one is not None)


def _body(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated inside a scope."""
    if isinstance(node, ast.Module | ast.ClassDef | Functions):
        yield from node.body
    elif isinstance(node, ast.Lambda):
        yield node.body
    elif isinstance(node, ast.DictComp):
        yield from (node.key, node.value, *_comprehensions(node))
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        yield from (node.elt, *_comprehensions(node))


def _comprehensions(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> Iterator[ast.AST]:
    for number, one in enumerate(node.generators):
        yield one.target
        if number:
            yield one.iter
        yield from one.ifs


def _outside(node: ast.AST) -> Iterator[ast.AST]:
    """What is evaluated around a scope: decorators, defaults, annotations, bases, the first iterable."""
    inside = set(map(id, _body(node)))
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield node.generators[0].iter
        return
    for child in ast.iter_child_nodes(node):
        if id(child) not in inside:
            yield child


def absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function that are not in another function, class or comprehension inside it."""
    waiting = list(_body(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
