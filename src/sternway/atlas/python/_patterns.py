"""Facts on patterns, performance, security and tests in a Python file, each with its line."""

from __future__ import annotations

import ast
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
    "typing.overload": "overload",
}
_BASES = {
    "abc.ABC": "abstract class",
    "typing.Protocol": "protocol",
    "typing.NamedTuple": "named tuple",
    "typing.TypedDict": "typed dictionary",
    "torch.autograd.Function": "autograd function",
    "torch.autograd.function.Function": "autograd function",
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
_PERFORMANCE = {
    "functools.lru_cache": "cached calls",
    "functools.cache": "cached calls",
    "torch.no_grad": "no gradients",
    "torch.inference_mode": "no gradients",
    "torch.jit.script": "TorchScript",
    "torch.jit.trace": "TorchScript",
    "torch.cuda.synchronize": "device synchronization",
    "torch.cuda.empty_cache": "cache emptied",
    "torch.cuda.Stream": "CUDA stream",
    "torch.cuda.stream": "CUDA stream",
    "torch.cuda.CUDAGraph": "CUDA graph",
    "torch.cuda.graph": "CUDA graph",
    "torch.utils.checkpoint.checkpoint": "activation checkpointing",
    "torch.utils.checkpoint.checkpoint_sequential": "activation checkpointing",
    "threading.Thread": "thread",
    "concurrent.futures.ThreadPoolExecutor": "thread pool",
    "concurrent.futures.ProcessPoolExecutor": "process pool",
    "multiprocessing.Process": "process",
    "multiprocessing.JobPool": "process pool",
    "torch.multiprocessing.spawn": "processes",
    "torch.multiprocessing.Process": "process",
    "gc.collect": "garbage collection",
    "time.sleep": "sleep",
}
_RUNS_CODE = {"eval", "exec", "compile", "__import__"}
_SECURITY_MODULES = ("subprocess.", "pickle.", "_pickle.", "marshal.", "shelve.", "dill.", "cloudpickle.")
_SECURITY = {
    "os.system",
    "os.popen",
    "os.execv",
    "os.execve",
    "os.execvp",
    "os.spawnv",
    "os.startfile",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "torch.serialization.load",
    "torch.hub.load",
    "joblib.load",
    "numpy.load",
    "tempfile.mktemp",
    "importlib.import_module",
    "ctypes.CDLL",
    "ctypes.cdll.LoadLibrary",
    "urllib.request.urlopen",
    "urllib.request.urlretrieve",
    "socket.socket",
}


def find(reading: Reading) -> Iterator[Fact]:
    """All facts for these sections, in no particular order."""
    yield from _definitions(reading)
    for use in reading.uses:
        if use.kind == "decorator":
            yield from _decorator(reading, use)
        elif use.kind == "call":
            yield from _call(reading, use)
        elif use.kind == "base" and isinstance(use.statement, ast.ClassDef):
            name = reading.absolute(use.node, use.scope)
            if kind := "enumeration" if name in _ENUMS else _BASES.get(name):
                yield Fact("patterns", kind, use.statement.name, use.statement.lineno)
    if reading.loops:
        depth, line = max(reading.loops, key=lambda loop: (loop[0], -loop[1]))
        if depth > 1:
            yield Fact("performance", "deepest loops", f"{depth} levels", line)


def _definitions(reading: Reading) -> Iterator[Fact]:
    for name, node, scope in reading.bodies:
        if isinstance(node, ast.AsyncFunctionDef):
            yield Fact("patterns", "async function", name, node.lineno)
        if scope in reading.yields:
            yield Fact("patterns", "generator", name, node.lineno, f"first yields at line {reading.yields[scope]}")
        owner, _, last = name.rpartition(".")
        if owner in reading.classes and (kind := _METHODS.get(last)):
            yield Fact("patterns", kind, owner, node.lineno, f"by {last}")
        if last.startswith("test") and (not owner or owner in reading.classes):
            yield Fact("testing", "test", name, node.lineno)


def _decorator(reading: Reading, use: Use) -> Iterator[Fact]:
    called = use.node.func if isinstance(use.node, ast.Call) else use.node
    name = reading.absolute(called, use.scope)
    owner: str = use.statement.name  # type: ignore[attr-defined]  # a decorator stands on a definition
    line: int = use.statement.lineno  # type: ignore[attr-defined]
    if kind := _DECORATORS.get(name):
        yield Fact("patterns", kind, owner, line)
    elif name == "pytest.fixture":
        yield Fact("testing", "fixture", owner, line)
    elif name.startswith("pytest.mark."):
        yield Fact("testing", "mark", f"{owner}: {ast.unparse(use.node)}", line)
    if not isinstance(use.node, ast.Call) and (kind := _PERFORMANCE.get(name)):
        yield Fact("performance", kind, f"@{name} on {owner}", use.node.lineno)


def _call(reading: Reading, use: Use) -> Iterator[Fact]:
    node = use.node
    assert isinstance(node, ast.Call)
    name = reading.absolute(node.func, use.scope)
    if kind := _PERFORMANCE.get(name):
        yield Fact("performance", kind, name, node.lineno)
    module, _, last = name.rpartition(".")
    if (module == "builtins" and last in _RUNS_CODE) or name in _SECURITY or name.startswith(_SECURITY_MODULES):
        called = last if module == "builtins" else name
        yield Fact("security", called, shortened(node), node.lineno, _note(node, name))
    elif name == "pytest.raises":
        yield Fact("testing", "expects an error", shortened(node), node.lineno)


def _note(node: ast.Call, name: str) -> str:
    given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
    if name in ("torch.load", "torch.serialization.load"):
        return f"weights_only={given['weights_only']}" if "weights_only" in given else "weights_only is not given"
    if name.startswith("subprocess.") and "shell" in given:
        return f"shell={given['shell']}"
    if name == "yaml.load" and ("Loader" in given or len(node.args) > 1):
        return f"Loader={given.get('Loader') or ast.unparse(node.args[1])}"
    return ""


def shortened(node: ast.expr, longest: int = 100) -> str:
    """An expression as code, on one line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
