"""Facts on a file's design: state that it keeps globally, what it starts, private names of other packages."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from sternway.atlas._records import Fact
from sternway.atlas.python._patterns import shortened
from sternway.atlas.python._reading import Reading

_TEXT = "append extend insert remove pop clear add discard update setdefault popitem appendleft popleft"
_CHANGES = frozenset(_TEXT.split())
_STARTS = {
    "threading.Thread": "thread",
    "threading.Timer": "thread",
    "concurrent.futures.ThreadPoolExecutor": "thread pool",
    "concurrent.futures.thread.ThreadPoolExecutor": "thread pool",
    "concurrent.futures.ProcessPoolExecutor": "process pool",
    "concurrent.futures.process.ProcessPoolExecutor": "process pool",
    "multiprocessing.pool.ThreadPool": "thread pool",
    "multiprocessing.Process": "process",
    "multiprocessing.Pool": "process pool",
    "torch.multiprocessing.Process": "process",
    "torch.multiprocessing.spawn": "processes",
    "torch.multiprocessing.start_processes": "processes",
    "subprocess.Popen": "program",
    "subprocess.run": "program",
    "subprocess.call": "program",
    "subprocess.check_call": "program",
    "subprocess.check_output": "program",
    "asyncio.create_subprocess_exec": "program",
    "asyncio.create_subprocess_shell": "program",
    "asyncio.create_task": "task",
    "asyncio.run": "event loop",
    "torch.cuda.Stream": "CUDA stream",
    "os.fork": "process",
}


def find(reading: Reading) -> Iterator[Fact]:
    yield from _state(reading)
    yield from _private(reading)
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call):
            name = reading.absolute(use.node.func, use.scope)
            if kind := _STARTS.get(name):
                yield Fact("starts", kind, shortened(use.node), use.node.lineno)


def _state(reading: Reading) -> Iterator[Fact]:
    """Names of the module that functions assign with ``global``, or whose value they change."""
    changed: dict[str, set[int]] = defaultdict(set)
    for use in reading.uses:
        target: ast.expr | None = None
        if use.kind == "stored" and isinstance(use.node, ast.Subscript):
            target = use.node.value
        elif use.kind == "call" and isinstance(use.node, ast.Call) and isinstance(use.node.func, ast.Attribute):
            target = use.node.func.value if use.node.func.attr in _CHANGES else None
        if not isinstance(target, ast.Name) or not _is_mutable(reading, target.id):
            continue
        if _in_function(reading, use.scope.name) and use.scope.binder(target.id) is reading.top:
            changed[target.id].add(use.node.lineno)
    defined = {item.name: item.line for item in reading.definitions if "." not in item.name}
    for name, lines in sorted(changed.items()):
        yield Fact("state", "changed in functions", name, defined.get(name, min(lines)), _lines("changed", lines))
    assigned: dict[str, set[int]] = defaultdict(set)
    for name, line in reading.globals:
        assigned[name].add(line)
    for name, lines in sorted(assigned.items()):
        yield Fact("state", "assigned by global", name, defined.get(name, min(lines)), _lines("declared", lines))


def _in_function(reading: Reading, scope: str) -> bool:
    """Whether a scope is a function or inside one, rather than a class body."""
    parts = scope.split(".")
    return any(".".join(parts[: depth + 1]) in reading.functions for depth in range(len(parts)))


def _is_mutable(reading: Reading, name: str) -> bool:
    value = reading.assigned.get(name)
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call)


def _lines(verb: str, lines: set[int]) -> str:
    shown = sorted(lines)
    return f"{verb} at line{'s' * (len(shown) > 1)} {', '.join(map(str, shown[:6]))}" + (
        f" and {len(shown) - 6} more" if len(shown) > 6 else ""
    )


def _private(reading: Reading) -> Iterator[Fact]:
    """Names with a leading underscore that belong to another top-level package."""
    own = reading.module.partition(".")[0]
    found: dict[str, int] = {}
    for item in reading.imports:
        whole = f"{item.module}.{item.name}" if item.name not in ("", "*") else item.module
        if not item.level and item.module.partition(".")[0] != own and _is_private(whole):
            found.setdefault(whole, item.line)
    for use in reading.uses:
        if use.kind == "attribute" and isinstance(use.node, ast.Attribute) and use.node.attr[:1] == "_":
            name = reading.absolute(use.node, use.scope)
            if name and name.partition(".")[0] not in (own, "builtins") and _is_private(name):
                found.setdefault(name, use.node.lineno)
    inner = {name.rpartition(".")[0] for name in found}
    inner |= {name.rpartition(".")[0] for name in inner}
    for name, line in found.items():
        if name not in inner:  # of ``a._b._c`` the whole is named, not its parts
            yield Fact("private", name.partition(".")[0], name, line)


def _is_private(name: str) -> bool:
    return any(part[:1] == "_" and part[:2] != "__" for part in name.split("."))
