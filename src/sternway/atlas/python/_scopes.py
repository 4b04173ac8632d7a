"""Python's scopes: what a name means, as far as that is known without running the code.

A name means an import or a definition only if it cannot mean anything else: a name that is bound to two different
things is unknown.
"""

from __future__ import annotations

import builtins

_BUILTINS = frozenset(dir(builtins))
UNKNOWN = ""  # bound to something that parsing cannot tell
FALLBACK = "None"  # bound to None, as after `except ImportError`


class Scope:
    """A module, a class, a function, a lambda or a comprehension."""

    __slots__ = ("_globals", "_means", "is_class", "name", "parent", "self_name", "star")

    def __init__(self, name: str, parent: Scope | None, *, is_class: bool = False, self_name: str = "") -> None:
        self.name, self.parent, self.is_class = name, parent, is_class
        self.self_name = self_name  # a method's first parameter
        self.star = False  # `from x import *` may bind anything here
        self._means: dict[str, str] = {}
        self._globals: frozenset[str] = frozenset()

    def inner(self, name: str) -> str:
        """The dotted name, within the file, of what is defined here as ``name``."""
        return f"{self.name}.{name}" if self.name else name

    def bind(self, name: str, meaning: str = UNKNOWN) -> None:
        """Record one meaning of ``name`` in this scope."""
        before = self._means.get(name)
        if before is None or before == FALLBACK:
            self._means[name] = meaning
        elif meaning not in (FALLBACK, before):
            self._means[name] = UNKNOWN

    def declare_global(self, name: str) -> None:
        """``global name``: the name is the module's here."""
        self._globals |= {name}
        self.bind(name)

    def find(self, name: str) -> str:
        """The absolute name that ``name`` means here; empty if it is not known."""
        scope: Scope | None = self
        starred = False
        while scope is not None:
            if not scope.is_class or scope is self:
                meaning = scope._means.get(name)
                if meaning is not None:
                    return "" if meaning == FALLBACK else meaning
                starred |= scope.star
            scope = scope.parent
        return f"builtins.{name}" if name in _BUILTINS and not starred else ""

    def binder(self, name: str) -> Scope | None:
        """The scope whose variable ``name`` is here; None for a builtin or an unknown name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope._globals:
                while scope.parent is not None:
                    scope = scope.parent
                return scope
            if name in scope._means and (not scope.is_class or scope is self):
                return scope
            scope = scope.parent
        return None

    def method_owner(self, name: str) -> str:
        """If ``name`` is a method's first parameter, the class of that method; else empty."""
        scope: Scope | None = self
        while scope is not None:
            if scope.self_name == name:
                return scope.name.rpartition(".")[0]
            if name in scope._means:
                return ""
            scope = scope.parent
        return ""
