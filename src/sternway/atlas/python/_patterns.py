"""Patterns and tests in a Python file, each with its line."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from sternway.atlas._records import Fact
from sternway.atlas.python._reading import Reading, Use

_DECORATORS = {
    "dataclasses.dataclass": "dataclass",
    "contextlib.contextmanager": "context manager",
    "contextlib.asynccontextmanager": "context manager",
    "abc.abstractmethod": "abstract method",
    "builtins.property": "property",
    "functools.cached_property": "property",
    "functools.singledispatch": "dispatch on type",
    "functools.lru_cache": "cache",
    "functools.cache": "cache",
    "typing.overload": "overload",
}
_BASES = {
    "abc.ABC": "abstract class",
    "typing.Protocol": "protocol",
    "typing_extensions.Protocol": "protocol",
    "typing.NamedTuple": "named tuple",
    "typing.TypedDict": "typed dictionary",
    "torch.autograd.Function": "autograd function",
    "torch.autograd.function.Function": "autograd function",
    "ast.NodeVisitor": "visitor",
    "ast.NodeTransformer": "visitor",
}
_ENUMS = {"enum.Enum", "enum.IntEnum", "enum.StrEnum", "enum.Flag", "enum.IntFlag"}
_METHODS = {
    "__enter__": "context manager",
    "__aenter__": "context manager",
    "__iter__": "iterable",
    "__getattr__": "dynamic attributes",
    "__call__": "callable object",
    "__get__": "descriptor",
}
_CALLS = {
    "threading.Lock": "lock",
    "threading.RLock": "lock",
    "threading.Condition": "lock",
    "threading.Semaphore": "lock",
    "asyncio.Lock": "lock",
    "multiprocessing.Lock": "lock",
    "weakref.ref": "weak reference",
    "weakref.proxy": "weak reference",
    "weakref.WeakKeyDictionary": "weak reference",
    "weakref.WeakValueDictionary": "weak reference",
    "weakref.WeakSet": "weak reference",
    "weakref.finalize": "finalizer",
    "contextvars.ContextVar": "context variable",
}


def find(reading: Reading) -> Iterator[Fact]:
    """All facts for these sections, in no particular order."""
    yield from _definitions(reading)
    yield from _tables(reading)
    for use in reading.uses:
        if use.kind == "decorator":
            yield from _decorator(reading, use)
        elif use.kind == "call" and isinstance(use.node, ast.Call):
            name = reading.absolute(use.node.func, use.scope)
            if kind := _CALLS.get(name):
                yield Fact("patterns", kind, shortened(use.node), use.node.lineno)
            elif name == "pytest.raises":
                yield Fact("testing", "expects an error", shortened(use.node), use.node.lineno)
        elif use.kind == "base" and isinstance(use.statement, ast.ClassDef):
            name = reading.absolute(use.node, use.scope)
            if kind := "enumeration" if name in _ENUMS else _BASES.get(name):
                yield Fact("patterns", kind, use.statement.name, use.statement.lineno)


def _definitions(reading: Reading) -> Iterator[Fact]:
    for name, node, scope in reading.bodies:
        if isinstance(node, ast.AsyncFunctionDef):
            yield Fact("patterns", "coroutine", name, node.lineno)
        if scope in reading.yields:
            yield Fact("patterns", "generator", name, node.lineno, f"first yields at line {reading.yields[scope]}")
        owner, _, last = name.rpartition(".")
        if owner in reading.classes and (kind := _METHODS.get(last)):
            yield Fact("patterns", kind, owner, node.lineno, f"by {last}")
        if last.startswith("test") and (not owner or owner in reading.classes):
            yield Fact("testing", "test", name, node.lineno)


def _tables(reading: Reading) -> Iterator[Fact]:
    """Dictionaries of the module: dispatch tables, and registries that functions fill with their own arguments."""
    for name, value in reading.assigned.items():
        if isinstance(value, ast.Dict) and len(value.values) >= 3 and all(map(_is_code, value.values)):
            known = [_is_function(reading, item) for item in value.values]
            if all(known):
                yield Fact("patterns", "dispatch table", name, value.lineno, f"{len(known)} entries")
    filled: dict[str, list[int]] = defaultdict(list)
    parameters = {name: _parameters(node) for name, node in reading.functions.items()}
    for use in reading.uses:
        if use.kind != "stored" or not isinstance(use.statement, ast.Assign) or not use.scope.name:
            continue
        assert isinstance(use.node, ast.Subscript)
        assert isinstance(use.node.value, ast.Name)
        name, value = use.node.value.id, use.statement.value
        if name in reading.assigned and use.scope.binder(name) is reading.top and isinstance(value, ast.Name):
            around = use.scope.name.split(".")
            owners = [".".join(around[: depth + 1]) for depth in range(len(around))]
            if any(value.id in parameters.get(owner, ()) for owner in owners):
                filled[name].append(use.node.lineno)
    for name, lines in sorted(filled.items()):
        yield Fact("patterns", "registry", name, reading.assigned[name].lineno, f"filled at line {lines[0]}")


def _is_code(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Name | ast.Attribute | ast.Lambda)


def _is_function(reading: Reading, node: ast.expr) -> bool:
    """Whether a value is a lambda, or a function or class of this file."""
    if isinstance(node, ast.Lambda):
        return True
    name = reading.absolute(node, reading.top).removeprefix(f"{reading.module}.")
    return name in reading.functions or name in reading.classes


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _decorator(reading: Reading, use: Use) -> Iterator[Fact]:
    called = use.node.func if isinstance(use.node, ast.Call) else use.node
    name = reading.absolute(called, use.scope)
    owner = use.scope.inner(use.statement.name)  # type: ignore[attr-defined]  # a decorator stands on a definition
    line: int = use.statement.lineno  # type: ignore[attr-defined]
    if kind := _DECORATORS.get(name):
        yield Fact("patterns", kind, owner, line)
    elif name == "pytest.fixture":
        yield Fact("testing", "fixture", owner, line)
    elif name.startswith("pytest.mark."):
        yield Fact("testing", "mark", f"{owner}: {ast.unparse(use.node)}", line)


def shortened(node: ast.expr, longest: int = 100) -> str:
    """An expression as code, on one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
