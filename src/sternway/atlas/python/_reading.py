"""What one pass over a Python file's syntax tree collects, and what its names mean.

The pass (``_pass.py``) only collects. Names are resolved afterwards, because an import may come after its use.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from sternway.atlas._records import Definition, Import
from sternway.atlas.python._docstrings import mentioned
from sternway.atlas.python._scopes import Scope

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Use(NamedTuple):
    """An expression whose meaning is looked up after the pass."""

    kind: str  # "call", "decorator", "base", "subscript", "attribute", "stored" (``name[key] = value``)
    node: ast.expr
    scope: Scope
    statement: ast.AST  # the definition or the assignment around it, where that matters
    loop: int = 0  # the line of the innermost loop around it
    lines: tuple[int, int] = (0, 0)  # of the statement around it


class Reading:
    """Everything that the pass collects from one module."""

    def __init__(self, module: str, package: str) -> None:
        self.module, self.package = module, package
        self.top = Scope("", None)
        self.uses: list[Use] = []
        self.lines: dict[str, list[int]] = {}  # every identifier
        self.kinds: dict[str, tuple[str, int]] = {}  # identifiers bound here: kind and defining line
        self.globals: list[tuple[str, int]] = []  # `global name` in a function
        self.assigned: dict[str, ast.expr] = {}  # names of the module that are assigned once, and their value
        self.growing: list[tuple[ast.Assign | ast.AugAssign, Scope, int]] = []  # `x += …`, `x = x + …` in loops
        self.membership: list[tuple[ast.Compare, Scope, int]] = []  # `x in y` in loops
        self.strings: list[tuple[str, ast.Constant, Scope]] = []  # names that are assigned a string literal
        self.returned: dict[str, list[str]] = {}  # by function
        self.raised: dict[str, list[str]] = {}
        self.mentions: dict[str, None] = {}
        self.yields: dict[Scope, int] = {}  # the first line that yields, for each function that does
        self.definitions: list[Definition] = []
        self.imports: list[Import] = []
        self.docs: list[tuple[str, int]] = []  # docstrings with their first line
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, FunctionNode] = {}
        self.bodies: list[tuple[str, FunctionNode, Scope]] = []  # every function, also two with the same name
        self.exports: tuple[str, ...] = ()
        self.main_line = 0

    def documented(self, text: str, raw: str, line: int) -> None:
        """Take in a docstring: its words, and the names that it mentions."""
        self.docs.append((raw, line))
        self.mentions.update(dict.fromkeys(mentioned(text)))

    @property
    def is_of_torch(self) -> bool:
        """Whether it imports torch or is a part of it: only then is ``x.backward()`` taken for a tensor's."""
        modules = [self.module, *(item.module for item in self.imports if not item.level)]
        return any(module.partition(".")[0] == "torch" for module in modules)

    def absolute(self, node: ast.expr, scope: Scope) -> str:
        """The absolute dotted name of ``a.b.c``; empty if it is not known."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        owner = scope.method_owner(node.id) if len(attributes) == 1 else ""
        if owner:
            name = f"{owner}.{attributes[0]}"
            return f"{self.module}.{name}" if name in self.functions or name in self.classes else ""
        meaning = scope.find(node.id)
        return ".".join([meaning, *reversed(attributes)]) if meaning else ""


def absolute_module(module: str, level: int, package: str) -> str | None:
    """The module that ``from ..module import`` means in ``package``; None if it goes above the top package.

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
