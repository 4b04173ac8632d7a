"""Resolve names: which file an import means, and which definition a call means, following re-exports.

Nothing is guessed. What is not found is "unresolved" if it should be in the tree; otherwise it belongs to the standard
library, or is outside the tree.
"""

from __future__ import annotations

import posixpath
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sternway.atlas._records import Base, Call, Definition, Facts, Import
from sternway.atlas.python._reading import absolute_module
from sternway.atlas.relate._modules import ModuleName

_FURTHEST = 16  # re-exports in a row
_PYTHON = "Python"
_SCRIPTS = ("JavaScript", "TypeScript")
_ENDINGS = (".ts", ".tsx", ".js", ".jsx", ".mjs", "/index.ts", "/index.js")


class Symbol(NamedTuple):
    """A definition in the tree; with an empty name, the file itself."""

    path: str
    name: str
    line: int


class Resolver:
    """Resolves the names of one tree."""

    def __init__(self, facts: Mapping[str, Facts], names: Mapping[str, ModuleName]) -> None:
        self._facts, self._names = facts, names
        modules: dict[str, list[str]] = defaultdict(list)
        for path, name in names.items():
            modules[name.module].append(path)
        self._modules = {name: _source_first(paths) for name, paths in modules.items()}
        self._tops = {name.partition(".")[0] for name in modules}
        self._definitions: dict[str, dict[str, Definition]] = {}
        self._imports: dict[str, dict[str, list[Import]]] = {}
        self._known: dict[str, Symbol | None] = {}
        self._by_tail: dict[str, list[str]] = defaultdict(list)
        for path in facts:
            self._by_tail[path.rpartition("/")[2]].append(path)

    def definitions(self, path: str) -> dict[str, Definition]:
        found = self._definitions.get(path)
        if found is None:
            found = {}
            for item in self._facts[path].definitions:
                if item.name not in found or found[item.name].kind == "variable":
                    found[item.name] = item
            self._definitions[path] = found
        return found

    def module(self, name: str) -> str | None:
        """The one file that ``import name`` means in this tree."""
        found = self._modules.get(name, [])
        return found[0] if len(found) == 1 else None

    def imported(self, path: str, item: Import) -> str:
        """The file that an import means; or "standard library", "outside the tree", "unresolved" (with no slash)."""
        if self._facts[path].language != _PYTHON:
            return self._included(path, item.module)
        base = absolute_module(item.module, item.level, self._names[path].package)
        if base is None:
            return "unresolved"
        whole = f"{base}.{item.name}" if base else item.name
        names = [whole, base] if item.name and item.name != "*" else [base]
        for name in names:
            if (file := self.module(name)) is not None:
                return file
        if item.level:
            return "unresolved"
        beside = self._beside(path, base)
        if beside is not None:
            return beside
        top = base.partition(".")[0]
        if top in self._tops and self.module(top):
            return "unresolved"
        return "standard library" if top in sys.stdlib_module_names else "outside the tree"

    def _beside(self, path: str, base: str) -> str | None:
        """A script's neighbour: files outside a package import files of their own folder."""
        if self._names[path].package:
            return None
        near = posixpath.join(posixpath.dirname(path), base.replace(".", "/") + ".py")
        return near if near in self._facts else None

    def _included(self, path: str, name: str) -> str:
        near = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        for ending in ("", *_ENDINGS) if self._facts[path].language in _SCRIPTS else ("",):
            if near + ending in self._facts:
                return near + ending
        if self._facts[path].language in _SCRIPTS:
            return "unresolved" if name.startswith(".") else "outside the tree"
        ends = [file for file in self._by_tail.get(name.rpartition("/")[2], ()) if f"/{file}".endswith(f"/{name}")]
        if len(ends) == 1:
            return ends[0]
        return "unresolved" if ends else "outside the tree"

    def called(self, path: str, call: Call) -> Symbol | None:
        """The definition that a call means."""
        if self._facts[path].language == _PYTHON:
            return self.symbol(call.name)
        return self._foreign(path, call)

    def base(self, path: str, base: Base) -> Symbol | None:
        """The definition that a base class means."""
        if self._facts[path].language == _PYTHON:
            return self.symbol(base.name)
        return self._foreign(path, Call(base.name, base.line, base.owner))

    def _foreign(self, path: str, call: Call) -> Symbol | None:
        """A call in another language: a definition of the file, or of one file that it includes or imports."""
        name = call.name.removeprefix("this.")
        first, _, rest = name.partition(".")
        for item in self._bound(path).get(first, ()):
            target = self.imported(path, item)
            wanted = rest if item.name in ("*", "default") else item.name
            if target in self._facts and wanted:
                return self._defined(target, wanted)
        if "." in name and name == call.name:
            return None  # a method of a value whose type is not known
        found = self._defined(path, name, call.scope)
        if found is not None or self._facts[path].language in _SCRIPTS:
            return found
        targets = dict.fromkeys(self.imported(path, item) for item in self._facts[path].imports)
        places = [self._defined(target, name) for target in targets if target in self._facts]
        known = [place for place in places if place is not None]
        return known[0] if len(known) == 1 else None

    def _defined(self, path: str, name: str, scope: str = "") -> Symbol | None:
        """A definition by the end of its name, if only one name has that end, or one is in the caller's own class."""
        own = self.definitions(path)
        mark = "." if self._facts[path].language in _SCRIPTS else "::"
        if name in own:
            return Symbol(path, name, own[name].line)
        around = scope.rpartition(mark)[0]
        while around:
            if f"{around}{mark}{name}" in own:
                whole = f"{around}{mark}{name}"
                return Symbol(path, whole, own[whole].line)
            around = around.rpartition(mark)[0]
        ends = [whole for whole in own if whole.endswith(f"{mark}{name}")] if mark == "::" else []
        return Symbol(path, ends[0], own[ends[0]].line) if len(ends) == 1 else None

    def symbol(self, name: str) -> Symbol | None:
        """The definition that an absolute dotted name means, if it is in this tree."""
        if name not in self._known:
            self._known[name] = self._find(name, frozenset())
        return self._known[name]

    def _find(self, name: str, visited: frozenset[str]) -> Symbol | None:
        if name in visited or len(visited) > _FURTHEST:
            return None
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            path = self.module(".".join(parts[:cut]))
            if path is not None:
                bound = self._bound_above(parts, visited | {name}) if cut == len(parts) > 1 else None
                return bound or self._inside(path, parts[cut:], visited | {name})
        return None

    def _bound_above(self, parts: list[str], visited: frozenset[str]) -> Symbol | None:
        """What a package binds to the name of one of its modules, such as a function of the same name."""
        above = self.module(".".join(parts[:-1]))
        found = self._inside(above, parts[-1:], visited) if above is not None else None
        return found if found is not None and found.name else None

    def _inside(self, path: str, rest: list[str], visited: frozenset[str]) -> Symbol | None:
        if not rest:
            return Symbol(path, "", 1)
        defined = self.definitions(path)
        whole = ".".join(rest)
        if whole in defined and defined[whole].kind != "variable":
            return Symbol(path, whole, defined[whole].line)
        if rest[0] in defined and defined[rest[0]].kind != "variable":
            return None  # an inherited method or an attribute: unknown without running the code
        for item in self._bound(path).get(rest[0], ()):
            for target in self._meant(path, item):
                found = self._find(".".join([target, *rest[1:]]), visited)
                if found is not None:
                    return found
        if whole in defined:
            return Symbol(path, whole, defined[whole].line)
        for base in self._starred(path, rest[0]):
            found = self._find(f"{base}.{whole}", visited)
            if found is not None:
                return found
        return None

    def _starred(self, path: str, name: str) -> list[str]:
        """Modules whose ``import *`` may bind a name: the last first; those whose ``__all__`` lacks it at the end."""
        bases = []
        for item in reversed(self._bound(path).get("*", ())):
            base = absolute_module(item.module, item.level, self._names[path].package)
            if base and not name.startswith("_"):
                file = self.module(base)
                exports = self._facts[file].exports if file is not None else ()
                bases.append((bool(exports) and name not in exports, base))
        return [base for _, base in sorted(bases, key=lambda pair: pair[0])]

    def _bound(self, path: str) -> dict[str, list[Import]]:
        found = self._imports.get(path)
        if found is None:
            found = defaultdict(list)
            for item in self._facts[path].imports:
                if item.where != "function":
                    found[item.bound].append(item)
            self._imports[path] = found
        return found

    def _meant(self, path: str, item: Import) -> Iterator[str]:
        base = absolute_module(item.module, item.level, self._names[path].package)
        if base is None:
            return
        if item.name:
            yield f"{base}.{item.name}"
        else:
            yield base if item.bound != base.partition(".")[0] else item.bound


def _source_first(paths: list[str]) -> list[str]:
    """Of a module and its stub, the module."""
    if len(paths) == 2:
        sources = [path for path in paths if not path.endswith(".pyi")]
        if len(sources) == 1:
            return sources
    return paths
