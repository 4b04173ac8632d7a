"""What a tree of Python files really has, found apart from the atlas: ``ast.walk``, ``symtable`` and ``tokenize``.

Scopes come from Python's own compiler (``symtable``), identifiers from its tokenizer; nothing of ``sternway.atlas`` is
imported here.
"""

from __future__ import annotations

import ast
import gc
import inspect
import io
import keyword
import re
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from claims import Claims, tail, words
from compiler import File, Functions, absolute, own_nodes
from truth_design import Design
from truth_training import training

_SOFT = {"match", "case", "type", "_"}
_DANGEROUS = re.compile(
    r"(subprocess|_?pickle|marshal|shelve|dill|cloudpickle)\.\w|os\.(system|popen|execv|execve|execvp|spawnv|startfile)$"
    r"|yaml\.(load|unsafe_load|full_load)$|torch\.(serialization\.|hub\.)?load$|(joblib|numpy)\.load$|tempfile\.mktemp$"
    r"|importlib\.import_module$|ctypes\.(CDLL|cdll\.LoadLibrary)$|urllib\.request\.(urlopen|urlretrieve)$|socket\.socket$"
)


class Light(NamedTuple):
    """What of a file is needed after its tree is gone."""

    top: dict[str, set[str]]
    names: set[str]  # of classes and functions, qualified
    variables: set[str]  # of modules and classes
    bases: list[tuple[str, str]]  # class, meaning of a base
    calls: list[tuple[str, str, int, str, int]]  # meaning, own method, line, the definition around, the loop around
    members: dict[str, set[str]]  # public members of each class
    imports: set[str]  # files that are imported when the module is
    tests: list[tuple[str, int]]
    text: list[str]
    module: str
    stars: list[str]  # modules in `from module import *`
    exports: set[str] | None  # `__all__`, where it is written out


class Truth:
    """Everything that is true of a package, in the form of the claims."""

    def __init__(self, root: Path, *, words: bool = True) -> None:
        self.claims: Claims = defaultdict(set)
        self.allowed: set[tuple[object, ...]] = set()  # words, and identifiers inside f-strings, which are one token
        self.files: dict[str, Light] = {}
        self.edges: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)  # who calls what
        self.loops: dict[tuple[str, str], set[tuple[int, str, int]]] = defaultdict(
            set
        )  # line, callee, line of the loop
        self.hot: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)  # calls of it in loops elsewhere
        self._located: dict[str, tuple[str, str] | None] = {}
        paths = sorted(root.rglob("*.py"))
        names = {path: [root.name, *path.relative_to(root).as_posix().removesuffix(".py").split("/")] for path in paths}
        self.modules = {
            ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path.relative_to(root).as_posix()
            for path, parts in names.items()
        }
        found = {name: module for module, name in self.modules.items()}
        gc.disable()  # the trees are many and hold no cycles
        for path, parts in names.items():
            name = path.relative_to(root).as_posix()
            try:
                file = File(name, found[name], ".".join(parts[:-1]), path.read_text("utf-8"))
            except (SyntaxError, ValueError):
                continue
            self.files[name] = self._light(file)  # the tree itself would not fit in memory two thousand times
            self._definitions(file)
            self._imports(file)
            design = Design(file)
            self._calls(file, design)
            if words:
                self._identifiers(file)
            for kind, claim in (*design.found(), *training(file, self.files[name].names)):
                self.claims[kind].add(claim)
        gc.enable()
        self._places()
        self._classes()

    def _light(self, file: File) -> Light:
        named, bases = set(), []
        for node, (owner, _, _) in file.owners.items():
            if isinstance(node, Functions | ast.ClassDef):
                name = f"{owner}.{node.name}" if owner else node.name
                named.add(name)
                for base in node.bases if isinstance(node, ast.ClassDef) else ():
                    bases.append((name, file.meaning(base.value if isinstance(base, ast.Subscript) else base)))
        variables = {
            f"{owner}.{target.id}" if owner else target.id
            for node, (owner, table, _) in file.owners.items()
            if isinstance(node, ast.Assign | ast.AnnAssign) and (table is file.table or table.get_type() == "class")
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        members: dict[str, set[str]] = defaultdict(set)
        for name in (*named, *variables):
            owner, _, last = name.rpartition(".")
            if owner and not last.startswith("_"):
                members[owner].add(last)
        top = dict(file.bindings[file.table.get_id()])
        stars = [
            absolute(node, file.package)
            for node, (_, table, _) in file.owners.items()
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and table is file.table
        ]
        exports = None
        for node in file.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                parts = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else []
                exports = {part.value for part in parts if isinstance(part, ast.Constant)} or None
        return Light(
            top, named, variables, bases, [], members, set(), [], file.text.split("\n"), file.module, stars, exports
        )

    def _definitions(self, file: File) -> None:
        path, claims = file.path, self.claims
        doc = ast.get_docstring(file.tree, clean=False)
        if doc and doc.strip():
            doc = re.sub(r"(?m)^\.\. currentmodule::.*$", "", doc)  # which is not shown
            text = re.sub(r":\w+:`(?:~(?:[\w.]*\.)?)?([\w.]+)`", r"\1", inspect.cleandoc(doc).strip())
            claims["module docstring"].add((path, file.tree.body[0].lineno, words(text)[:6]))
        for node in file.tree.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'",):
                name = path.rpartition("/")[2]
                if not re.match(r"(test_.*|.*_test|conftest|__main__)\.py$", name):
                    claims["script guard"].add((path, node.lineno))
                break
        for node, (owner, table, _) in file.owners.items():
            in_class = table.get_type() == "class"
            if isinstance(node, ast.ClassDef):
                name = f"{owner}.{node.name}" if owner else node.name
                claims["definition"].add((path, "class", name, node.lineno))
                self._decorators(file, node, name)
                for base in node.bases:
                    plain = base.value if isinstance(base, ast.Subscript) else base
                    claims["base class"].add((path, base.lineno, name, tail(file.meaning(plain) or ast.unparse(plain))))
            elif isinstance(node, Functions):
                name = f"{owner}.{node.name}" if owner else node.name
                claims["definition"].add((path, "method" if in_class else "function", name, node.lineno))
                if isinstance(node, ast.AsyncFunctionDef):
                    claims["async function"].add((path, name, node.lineno))
                bare = ast.FunctionDef("f", node.args, [ast.Pass()], [], node.returns)
                claims["signature"].add(
                    (path, name, node.lineno, ast.dump(ast.parse(ast.unparse(ast.fix_missing_locations(bare))).body[0]))
                )
                self._decorators(file, node, name)
                if any(isinstance(one, ast.Yield | ast.YieldFrom) for one in own_nodes(node)):
                    claims["generator"].add((path, node.lineno))
                owner_is_class_or_top = in_class or table.get_type() == "module"
                if node.name.startswith("test") and owner_is_class_or_top:
                    claims["test"].add((path, node.lineno))
                    self.files[path].tests.append((name, node.lineno))
                if in_class and node.name in ("__enter__", "__aenter__"):
                    claims["context manager"].add((path, node.lineno))
            elif isinstance(node, ast.Assign | ast.AnnAssign) and (in_class or table is file.table):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and not (
                        target.id == "__all__" and isinstance(node.value, ast.List | ast.Tuple)
                    ):
                        claims["definition"].add(
                            (path, "variable", f"{owner}.{target.id}" if owner else target.id, target.lineno)
                        )

    def _decorators(self, file: File, node: Functions | ast.ClassDef, name: str) -> None:
        kinds = {
            "dataclasses.dataclass": "dataclass",
            "contextlib.contextmanager": "context manager",
            "contextlib.asynccontextmanager": "context manager",
            "builtins.property": "property",
            "functools.cached_property": "property",
        }
        for one in node.decorator_list:
            self.claims["decorator"].add((file.path, name, node.lineno, ast.dump(ast.parse(ast.unparse(one)))))
            if kind := kinds.get(file.meaning(one.func if isinstance(one, ast.Call) else one)):
                self.claims[kind].add((file.path, node.lineno))

    def _imports(self, file: File) -> None:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(
                        file, node.lineno, alias.name, "", [alias.name], relative=False, at_import=file.at_import(node)
                    )
            elif isinstance(node, ast.ImportFrom):
                base = absolute(node, file.package)
                for alias in node.names:
                    wanted = [base] if alias.name == "*" else [f"{base}.{alias.name}", base]
                    self._import(
                        file,
                        node.lineno,
                        "." * node.level + (node.module or ""),
                        alias.name,
                        wanted,
                        relative=bool(node.level),
                        at_import=file.at_import(node),
                    )

    def _import(
        self, file: File, line: int, module: str, name: str, wanted: list[str], *, relative: bool, at_import: bool
    ) -> None:
        self.claims["import"].add((file.path, line, module, name))
        target = next((self.modules[one] for one in wanted if one in self.modules), "")
        if target:
            self.claims["import resolved to a file"].add((file.path, line, module, name, target))
            if target != file.path:
                self.claims["imported by"].add((target, file.path))
                if at_import:
                    self.files[file.path].imports.add(target)
        elif relative or wanted[-1].partition(".")[0] in self.modules:
            self.claims["import unresolved"].add((file.path, line, module, name))

    def _calls(self, file: File, design: Design) -> None:
        for node in file.owners:
            if not isinstance(node, ast.Call):
                continue
            name = file.meaning(node.func)
            if name in ("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"):
                self.claims["security finding"].add((file.path, node.lineno, name.removeprefix("builtins.")))
            elif _DANGEROUS.match(name):
                self.claims["security finding"].add((file.path, node.lineno, name))
            own = self._own(file, node)
            if own or name:
                loop = design.loop(node)
                around = loop.lineno if loop is not None else 0  # type: ignore[attr-defined]
                self.files[file.path].calls.append((name, own, node.lineno, file.owners[node][0], around))

    def _places(self) -> None:
        """Where calls lead, once every file is known."""
        for path, file in self.files.items():
            for name, own, line, scope, loop in file.calls:
                place = (path, own) if own else self.locate(name)
                if loop and loop != line and not name.startswith("builtins."):
                    self.loops[path, scope].add((line, name or f"{file.module}.{own}", loop))
                if place is not None:
                    self.claims["called at"].add((*place, path, line))
                    self.edges[path, scope].add(place)
                    if loop and (path, scope) != place:
                        self.hot[place].add((path, line))
        kind = "performance: loop in a hot path"
        self.claims[kind].update(place for place in self.loops if place in self.hot)

    def _own(self, file: File, node: ast.Call) -> str:
        name = file.own_method(node)
        return name if name in self.files[file.path].names else ""

    def _identifiers(self, file: File) -> None:
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                target = self.allowed if token.string in _SOFT else self.claims["identifier or word"]
                target.add((file.path, token.string, token.start[0]))  # type: ignore[union-attr]
            elif token.type in (tokenize.STRING, tokenize.COMMENT):
                for row, text in enumerate(token.string.split("\n"), token.start[0]):
                    names = re.findall(r"[^\W\d]\w*", text)
                    self.allowed.update((file.path, form, row) for name in names for form in (name, name.lower()))
                    self.allowed.update((file.path, word, row) for word in re.findall(r"[^\W\d_]+", text.lower()))

    def locate(self, name: str) -> tuple[str, str] | None:
        """The file and the qualified name of a definition, following re-exports."""
        if name not in self._located:
            self._located[name] = self._locate(name, frozenset())
        return self._located[name]

    def _locate(self, name: str, seen: frozenset[str]) -> tuple[str, str] | None:
        if name in seen or len(seen) > 24:  # `from .k import k`, where k is compiled, leads on for ever
            return None
        seen |= {name}
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            path = self.modules.get(".".join(parts[:cut]))
            if path is None or path not in self.files:
                continue
            file, rest = self.files[path], parts[cut:]
            known = file.names
            if ".".join(rest) in known:
                return path, ".".join(rest)
            if rest[0] in known:
                return None
            for meaning in sorted(file.top.get(rest[0], ())):
                if meaning and (found := self._locate(".".join([meaning, *rest[1:]]), seen)):
                    return found
            if ".".join(rest) in file.variables:
                return path, ".".join(rest)
            for star in self._stars(file, rest[0]):
                if found := self._locate(f"{star}.{'.'.join(rest)}", seen):
                    return found
            return None
        return None

    def _stars(self, file: Light, name: str) -> list[str]:
        """Modules that are imported with a star: the last binds a name, if its ``__all__`` names it."""
        found = []
        for module in reversed(file.stars):
            known = self.files.get(self.modules.get(module, ""))
            found.append((known is not None and known.exports is not None and name not in known.exports, module))
        return [module for _, module in sorted(found, key=lambda pair: pair[0])] if not name.startswith("_") else []

    def reached(self, start: tuple[str, str], most: int = 6) -> set[tuple[str, str]]:
        """The definitions that a function reaches through calls; calling a class calls its ``__init__``."""
        seen: set[tuple[str, str]] = set()
        ring = {start}
        for _ in range(most):
            ring = {place for one in ring for place in self._next(one)} - seen
            seen |= ring
        return seen

    def _next(self, place: tuple[str, str]) -> set[tuple[str, str]]:
        return {*self.edges.get(place, ()), (place[0], f"{place[1]}.__init__")}

    def ancestors(self, path: str, owner: str) -> set[tuple[str, str]]:
        """The base classes of a class in the tree, and theirs."""
        seen: set[tuple[str, str]] = set()
        waiting = [(path, owner)]
        while waiting:
            path, owner = waiting.pop()
            for name, meaning in self.files[path].bases if path in self.files else ():
                place = self.locate(meaning) if name == owner else None
                if place is not None and place not in seen:
                    seen.add(place)
                    waiting.append(place)
        return seen

    def _classes(self) -> None:
        """Subclasses, and what derives from nn.Module."""
        below: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
        for path, file in self.files.items():
            for name, meaning in file.bases:
                if meaning == "torch.nn.Module":  # where torch itself is outside the tree
                    below["nn/modules/module.py", "Module"].add((path, name))
                place = self.locate(meaning)
                if place is not None:
                    below[place].add((path, name))
        for (path, owner), found in below.items():
            if path not in self.files:
                continue
            self.claims["subclassed by"].update((path, owner, by, name) for by, name in found)
        waiting, seen = [("nn/modules/module.py", "Module")], set()
        while waiting:
            for one in below.get(waiting.pop(), ()):
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        self.claims["nn.Module subclass"].update(seen)
