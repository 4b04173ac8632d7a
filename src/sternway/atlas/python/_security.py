"""Findings on security in a Python file, each with its line and a weight.

high: runs text or data as code, or a shell. medium: does so unless an argument or the caller prevents it. low: worth
knowing, such as a program that is started or a connection that is opened.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sternway.atlas._records import Fact
from sternway.atlas.python._patterns import shortened
from sternway.atlas.python._reading import Reading, Use

_WEIGHTS = {
    **dict.fromkeys(("builtins.eval", "builtins.exec"), "high"),
    **dict.fromkeys(("builtins.compile", "builtins.__import__", "importlib.import_module"), "low"),
    **dict.fromkeys(("os.system", "os.popen", "yaml.unsafe_load", "tempfile.mktemp"), "high"),
    **dict.fromkeys(("os.execv", "os.execve", "os.execvp", "os.spawnv", "os.startfile"), "medium"),
    **dict.fromkeys(("yaml.load", "yaml.full_load", "joblib.load", "torch.hub.load"), "medium"),
    **dict.fromkeys(("torch.load", "torch.serialization.load", "numpy.load"), "medium"),
    **dict.fromkeys(("ctypes.CDLL", "ctypes.cdll.LoadLibrary"), "low"),
    **dict.fromkeys(("urllib.request.urlopen", "urllib.request.urlretrieve", "socket.socket"), "low"),
}
_UNPICKLES = ("pickle.", "_pickle.", "marshal.", "shelve.", "dill.", "cloudpickle.")
_SQL = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|DROP|CREATE|ALTER)\s", re.IGNORECASE)
_SECRET = re.compile(r"(?:^|_)(password|passwd|secret|api_?key|access_?key|private_?key|auth_?token)$", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"[<{$%*\s]|^x+$|example|change|your|dummy|test", re.IGNORECASE)
_INPUT = {"builtins.input", "sys.argv", "os.environ", "os.environ.get", "os.getenv"}
_JOINS = {"os.path.join", "builtins.open", "pathlib.Path", "pathlib.PurePath"}


def find(reading: Reading) -> Iterator[Fact]:
    for use in reading.uses:
        if use.kind == "call" and isinstance(use.node, ast.Call):
            yield from _call(reading, use, use.node)
    for name, value, _ in reading.strings:
        if _SECRET.search(name) and len(str(value.value)) >= 8 and not _PLACEHOLDER.search(str(value.value)):
            yield Fact("security", "secret in the source", name, value.lineno, "a string literal is assigned", "medium")


def _call(reading: Reading, use: Use, node: ast.Call) -> Iterator[Fact]:
    name = reading.absolute(node.func, use.scope)
    if weight := _weight(name, node):
        called = name.removeprefix("builtins.")
        yield Fact("security", called, shortened(node), node.lineno, _note(node, name), weight)
    elif name in _JOINS and (source := _from_input(reading, use, node)):
        yield Fact("security", "path from input", shortened(node), node.lineno, f"from {source}", "medium")
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if method in ("execute", "executemany") and node.args and _is_made_sql(node.args[0]):
        yield Fact("security", "SQL made of strings", shortened(node), node.lineno, "", "high")


def _weight(name: str, node: ast.Call) -> str:
    given = {word.arg: word.value for word in node.keywords if word.arg}
    if name.startswith("subprocess."):
        return "high" if _is_true(given.get("shell")) else "low"
    if name.startswith(_UNPICKLES):
        reads = name.rpartition(".")[2] in ("load", "loads", "Unpickler", "open")
        return "high" if reads else "low"
    if name in ("torch.load", "torch.serialization.load") and _is_true(given.get("weights_only")):
        return "low"
    if name == "yaml.load" and "Safe" in _loader(node):
        return "low"
    return _WEIGHTS.get(name, "")


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _loader(node: ast.Call) -> str:
    given = {word.arg: word.value for word in node.keywords}
    found = given.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
    return ast.unparse(found) if found is not None else ""


def _is_made_sql(node: ast.expr) -> bool:
    """An f-string with values, or text joined by ``+``, ``%`` or ``format``, that starts like SQL."""
    if isinstance(node, ast.JoinedStr):
        first = node.values[0] if node.values else None
        made = any(isinstance(part, ast.FormattedValue) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        first, made = node.left, True
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        first, made = node.func.value, True
    else:
        return False
    return made and isinstance(first, ast.Constant) and isinstance(first.value, str) and bool(_SQL.match(first.value))


def _from_input(reading: Reading, use: Use, node: ast.Call) -> str:
    """Where an argument comes straight from the user: ``input()``, ``sys.argv`` or the environment."""
    for argument in node.args:
        for part in ast.walk(argument):
            if isinstance(part, ast.Attribute | ast.Name):
                name = reading.absolute(part, use.scope)
                if name in _INPUT:
                    return name.removeprefix("builtins.")
    return ""


def _note(node: ast.Call, name: str) -> str:
    given = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
    if name in ("torch.load", "torch.serialization.load"):
        return f"weights_only={given['weights_only']}" if "weights_only" in given else "weights_only is not given"
    if name.startswith("subprocess.") and "shell" in given:
        return f"shell={given['shell']}"
    if name == "yaml.load" and (loader := _loader(node)):
        return f"Loader={loader}"
    return ""
