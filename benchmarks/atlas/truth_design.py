"""What is true of one file's design: patterns, state, what it starts, private names, findings. Apart from the atlas.

Loops and functions around a node come from a map of parents; names from Python's own symbol tables (``compiler.py``).
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from compiler import File, Functions

Found = Iterator[tuple[str, tuple[object, ...]]]  # kind of claim, claim

_DECORATED = {
    "abstract method": r"abc\.abstractmethod$",
    "dispatch on type": r"functools\.singledispatch$",
    "cache": r"functools\.(lru_cache|cache)$",
    "overload": r"typing\.overload$",
}
_DERIVED = {
    "abstract class": r"abc\.ABC$",
    "protocol": r"typing(_extensions)?\.Protocol$",
    "named tuple": r"typing\.NamedTuple$",
    "typed dictionary": r"typing\.TypedDict$",
    "autograd function": r"torch\.autograd\.(function\.)?Function$",
    "visitor": r"ast\.Node(Visitor|Transformer)$",
    "enumeration": r"enum\.(Enum|IntEnum|StrEnum|Flag|IntFlag)$",
}
_CALLED = {
    "lock": r"(threading\.(Lock|RLock|Condition|Semaphore)|asyncio\.Lock|multiprocessing\.Lock)$",
    "weak reference": r"weakref\.(ref|proxy|WeakKeyDictionary|WeakValueDictionary|WeakSet)$",
    "finalizer": r"weakref\.finalize$",
    "context variable": r"contextvars\.ContextVar$",
}
_MEMBERS = {
    "__iter__": "iterable",
    "__getattr__": "dynamic attributes",
    "__call__": "callable object",
    "__get__": "descriptor",
}
_STARTED = {
    "thread": r"threading\.(Thread|Timer)$",
    "thread pool": r"(concurrent\.futures\.(thread\.)?ThreadPoolExecutor|multiprocessing\.pool\.ThreadPool)$",
    "process pool": r"(concurrent\.futures\.(process\.)?ProcessPoolExecutor|multiprocessing\.Pool)$",
    "process": r"((torch\.)?multiprocessing\.Process|os\.fork)$",
    "processes": r"torch\.multiprocessing\.(spawn|start_processes)$",
    "program": r"(subprocess\.(Popen|run|call|check_call|check_output)|asyncio\.create_subprocess_(exec|shell))$",
    "task": r"asyncio\.create_task$",
    "event loop": r"asyncio\.run$",
    "CUDA stream": r"torch\.cuda\.Stream$",
}
_BLOCKING = re.compile(
    r"(time\.sleep|builtins\.input|os\.system|subprocess\.(run|call|check_call|check_output)|urllib\.request\.urlopen"
    r"|requests\.(get|post|put|delete|patch|head|request)|socket\.create_connection)$"
)
_SECRET = re.compile(r"(?i)(?:^|_)(password|passwd|secret|api_?key|access_?key|private_?key|auth_?token)$")
_HARMLESS = re.compile(r"(?i)[<{$%*\s]|^x+$|example|change|your|dummy|test")
_MUTABLE = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call
_TEXT = "append extend insert remove pop clear add discard update setdefault popitem appendleft popleft"
_CHANGES = set(_TEXT.split())
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_LOOPS = ast.For | ast.AsyncFor | ast.While


class Design:
    """The design facts of one file."""

    def __init__(self, file: File) -> None:
        self.file, self.path = file, file.path
        self.parents = {child: node for node in ast.walk(file.tree) for child in ast.iter_child_nodes(node)}
        self.torch = file.module.partition(".")[0] == "torch" or any(map(self._imports_torch, ast.walk(file.tree)))
        self.raises: dict[ast.AST | None, list[ast.Raise]] = defaultdict(list)  # by the function around
        self.functions: set[str] = set()
        for node, (owner, _, function) in file.owners.items():
            if isinstance(node, ast.Raise) and not self._in_class(node, function):
                self.raises[function].append(node)
            elif isinstance(node, Functions):
                self.functions.add(f"{owner}.{node.name}")
        self.assigned: dict[str, ast.expr] = {}
        for node, (_, table, _) in file.owners.items():
            if isinstance(node, ast.Assign | ast.AnnAssign) and table is file.table and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.assigned[target.id] = node.value

    def found(self) -> Found:
        for node in self.file.owners:
            if isinstance(node, ast.ClassDef | Functions):
                yield from self._definition(node)
            elif isinstance(node, ast.Call):
                yield from self._call(node)
                yield from self._performance(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from self._secret(node)
                yield from self._growing(node) if isinstance(node, ast.Assign) else ()
            elif isinstance(node, ast.Compare):
                yield from self._membership(node)
        yield from self._tables()
        yield from self._state()
        yield from self._private()

    def _definition(self, node: ast.ClassDef | Functions) -> Found:
        for one in node.decorator_list:
            name = self.file.meaning(one.func if isinstance(one, ast.Call) else one)
            yield from ((kind, (self.path, node.lineno)) for kind, mark in _DECORATED.items() if re.match(mark, name))
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = self.file.meaning(base)
                yield from ((kind, (self.path, node.lineno)) for kind, mark in _DERIVED.items() if re.match(mark, name))
            return
        if isinstance(node, ast.AsyncFunctionDef):
            yield "coroutine", (self.path, node.lineno)
        owner = self.file.owners[node][1]
        if owner.get_type() == "class" and node.name in _MEMBERS:
            yield _MEMBERS[node.name], (self.path, node.lineno)
        qualified = self.file.owners[node][0]
        name = f"{qualified}.{node.name}" if qualified else node.name
        raised = []
        for one in self.raises[node]:
            error = one.exc.func if isinstance(one.exc, ast.Call) else one.exc
            if isinstance(error, ast.Name | ast.Attribute):
                raised.append(ast.unparse(error))
        for error_name in raised:
            if error_name.rpartition(".")[2][:1].isupper():
                yield "raises", (self.path, name, error_name)

    def _in_class(self, node: ast.AST, function: ast.AST | None) -> bool:
        while node is not function and node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.ClassDef):
                return True
        return False

    def _call(self, node: ast.Call) -> Found:
        name = self.file.meaning(node.func)
        for kind, mark in _CALLED.items():
            if re.match(mark, name):
                yield kind, (self.path, node.lineno)
        for kind, mark in _STARTED.items():
            if re.match(mark, name):
                yield "starts", (self.path, kind, node.lineno)
        if name in ("os.path.join", "builtins.open", "pathlib.Path", "pathlib.PurePath"):
            inside = [part for one in node.args for part in ast.walk(one) if isinstance(part, ast.Name | ast.Attribute)]
            sources = {"builtins.input", "sys.argv", "os.environ", "os.environ.get", "os.getenv"}
            if any(self.file.meaning(part) in sources for part in inside):
                yield "security finding", (self.path, node.lineno, "path from input")

        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in ("execute", "executemany") and node.args and _makes_sql(node.args[0]):
            yield "security finding", (self.path, node.lineno, "SQL made of strings")

    def _secret(self, node: ast.Assign | ast.AnnAssign) -> Found:
        value = node.value
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str) or len(value.value) < 8:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and _SECRET.search(target.id) and not _HARMLESS.search(value.value):
                yield "security finding", (self.path, value.lineno, "secret in the source")

    # -- loops

    def loop(self, node: ast.AST) -> ast.AST | None:
        """The innermost loop whose body runs this node again and again, within the same function."""
        while (parent := self.parents.get(node)) is not None and not isinstance(parent, Functions | ast.Module):
            if isinstance(parent, _LOOPS) and node in (
                *parent.body,
                *([parent.test] if isinstance(parent, ast.While) else [parent.target]),
            ):
                return parent
            if isinstance(parent, _COMPREHENSIONS) and node is not parent.generators[0]:
                return parent
            if isinstance(parent, ast.comprehension):
                around = self.parents[parent]
                first = around.generators[0] is parent  # type: ignore[attr-defined]
                if not (first and node is parent.iter):
                    return around
                node = parent
            node = self.parents[node]
        return None

    def _performance(self, node: ast.Call) -> Found:
        name, where = self.file.meaning(node.func), (self.path, node.lineno)
        if not name:
            own = self.file.own_method(node)
            name = f"own {own}" if own in self.functions else ""
        function = self._function(node)
        if isinstance(function, ast.AsyncFunctionDef) and _BLOCKING.match(name):
            yield "performance: blocking call in async code", where
        if self.loop(node) is None:
            return
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        bare = not node.args and not node.keywords and not name
        if (self.torch and bare and method in ("item", "tolist", "cpu", "numpy")) or re.match(
            r"torch\.(cuda|accelerator|mps)\.synchronize$", name
        ):
            yield "performance: device synchronization in a loop", where
        elif name in ("re.compile", "copy.deepcopy", "gc.collect", "torch.cuda.empty_cache"):
            yield "performance: repeated work in a loop", where
        elif re.match(r"(torch|numpy)\.(zeros|ones|empty|full|rand|randn|arange|linspace|eye|tensor)(_like)?$", name):
            yield "performance: allocation in a loop", where
        elif not name and (method, len(node.args)) in (("pop", 1), ("insert", 2)) and ast.unparse(node.args[0]) == "0":
            yield "performance: quadratic: at the front of a list", where

    def _function(self, node: ast.AST) -> ast.AST | None:
        at: ast.AST | None = node
        while at is not None and not isinstance(at, Functions):
            before, at = at, self.parents.get(at)
            if isinstance(at, Functions) and before not in at.body:
                at = self.parents.get(at)
        return at

    def _imports_torch(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(one.name.partition(".")[0] == "torch" for one in node.names)
        return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"

    def _growing(self, node: ast.Assign) -> Found:
        value, target = node.value, node.targets[0]
        if self.loop(node) is None or len(node.targets) != 1 or not isinstance(value, ast.Call):
            return
        joins = r"(torch\.(cat|concat|hstack|vstack|stack)|numpy\.(concatenate|append|hstack|vstack)|pandas\.concat)$"
        if isinstance(target, ast.Name) and value.args and re.match(joins, self.file.meaning(value.func)):
            first = value.args[0]
            parts = first.elts if isinstance(first, ast.List | ast.Tuple) else [first]
            if any(isinstance(part, ast.Name) and part.id == target.id for part in parts):
                yield "performance: quadratic: grows by copying", (self.path, value.lineno)

    def _membership(self, node: ast.Compare) -> Found:
        right = node.comparators[0]
        if isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(right, ast.Name) and self.loop(node) is not None:
            value = self.assigned.get(right.id)
            if isinstance(value, ast.List) and len(value.elts) > 8 and self._is_global(right):
                yield "performance: linear search in a loop", (self.path, node.lineno)

    # -- the module's own names

    def _is_global(self, node: ast.Name) -> bool:
        table = self.file.owners[node][1]
        try:
            return table is self.file.table or table.lookup(node.id).is_global()
        except KeyError:
            return False

    def _tables(self) -> Found:
        kinds = {
            f"{owner}.{node.name}" if owner else node.name
            for node, (owner, _, _) in self.file.owners.items()
            if isinstance(node, ast.ClassDef | Functions)
        }
        for value in self.assigned.values():
            if isinstance(value, ast.Dict) and len(value.values) >= 3:
                names = [self.file.meaning(one).removeprefix(f"{self.file.module}.") for one in value.values]
                pairs = zip(value.values, names, strict=True)
                if all(isinstance(one, ast.Lambda) or (name and name in kinds) for one, name in pairs):
                    yield "dispatch table", (self.path, value.lineno)
        for node, (_, _, function) in self.file.owners.items():
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name) or function is None:
                continue
            for target in node.targets:
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    name = target.value.id
                    if (
                        name in self.assigned
                        and self._is_global(target.value)
                        and self._is_argument(node.value, function)
                    ):
                        yield "registry", (self.path, self.assigned[name].lineno)

    def _is_argument(self, node: ast.Name, function: ast.AST | None) -> bool:
        while isinstance(function, Functions):
            given = function.args
            if any(one.arg == node.id for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
                return True
            function = self.file.owners[function][2]
        return False

    def _state(self) -> Found:
        for node, (_, _, function) in self.file.owners.items():
            if isinstance(node, ast.Global):
                yield from (("state: assigned by global", (self.path, name)) for name in node.names)
            target: ast.expr | None = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                target = node.func.value
            if function is None or not isinstance(target, ast.Name) or not self._is_global(target):
                continue
            if isinstance(self.assigned.get(target.id), _MUTABLE):
                yield "state: changed in functions", (self.path, target.id)

    def _private(self) -> Found:
        own, names = self.file.module.partition(".")[0], set()
        for node in self.file.owners:
            if isinstance(node, ast.Import):
                names |= {one.name for one in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {f"{node.module}.{one.name}" if one.name != "*" else str(node.module) for one in node.names}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not isinstance(node.ctx, ast.Store):
                names.add(self.file.meaning(node))
        kept = {
            name
            for name in names
            if name.partition(".")[0] not in (own, "builtins", "")
            and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        }
        above: dict[str, int] = defaultdict(int)
        for name in kept:
            parent = name.rpartition(".")[0]
            above[parent] += 1
            above[parent.rpartition(".")[0]] += 1
        yield from (("private name", (self.path, name)) for name in kept if name not in above)


def _makes_sql(node: ast.expr) -> bool:
    """Text that starts as SQL does, with values put into it."""
    first = ""
    if isinstance(node, ast.JoinedStr) and any(isinstance(part, ast.FormattedValue) for part in node.values):
        first = getattr(node.values[0], "value", "")
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        first = getattr(node.left, "value", "")
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        first = getattr(node.func.value, "value", "")
    return isinstance(first, str) and bool(re.match(r"(?i)\s*(select|insert|update|delete|drop|create|alter)\s", first))
