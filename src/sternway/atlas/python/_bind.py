"""The names of a Python file: where each is seen and bound, and what imports bind."""

from __future__ import annotations

import ast

from sternway.atlas._records import Import
from sternway.atlas.python._reading import Reading, absolute_module
from sternway.atlas.python._scopes import UNKNOWN, Scope


class NameBinder:
    """The part of the pass that records identifiers and imports."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._lines, self._kinds = reading.lines, reading.kinds
        self._typing = False  # inside `if TYPE_CHECKING`

    def _seen(self, name: str, line: int) -> None:
        lines = self._lines.get(name)
        if lines is None:
            self._lines[name] = [line]
        elif lines[-1] != line:
            lines.append(line)

    def _bound(self, name: str, kind: str, line: int) -> None:
        if name not in self._kinds or (self._kinds[name][0] == "parameter" and kind != "parameter"):
            self._kinds[name] = (kind, line)

    def _import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            for part in alias.name.split("."):
                self._seen(part, alias.lineno)
            bound = alias.asname or alias.name.partition(".")[0]
            self.reading.imports.append(Import(node.lineno, alias.name, 0, "", bound, self._where(scope)))
            self._bind_import(alias, bound, alias.name if alias.asname else bound, scope)

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        module = node.module or ""
        base = absolute_module(module, node.level, self.reading.package)
        for part in module.split("."):
            if part:
                self._seen(part, node.lineno)
        for alias in node.names:
            bound = alias.asname or alias.name
            self.reading.imports.append(Import(node.lineno, module, node.level, alias.name, bound, self._where(scope)))
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

    def _where(self, scope: Scope) -> str:
        if self._typing:
            return "typing"
        while scope.is_class and scope.parent is not None:
            scope = scope.parent
        return "module" if scope is self.reading.top else "function"
