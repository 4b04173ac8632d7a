"""Private names of torch stand in ``sternway._torch`` alone, and each does what its probe says."""

import ast
from pathlib import Path

import pytest

from sternway import _torch
from sternway._torch import all_probes, probe, require
from sternway.errors import UnsupportedTorch

SOURCE = Path(_torch.__file__).parents[1]
ABOUT_TORCH = {Path("atlas/python/_training.py")}  # names that users' code may have
TENSOR_NAMES = {
    "_C",
    "_backward_hooks",
    "_base",
    "_cdata",
    "_indices",
    "_input_metadata",
    "_is_view",
    "_post_accumulate_grad_hooks",
    "_values",
    "_version",
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def chain(node: ast.expr) -> list[str]:
    """``torch.a._b`` as its names, from the left; empty if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def leans_on(node: ast.AST) -> str | None:
    """The private name of torch that a piece of syntax uses."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if alias.name.split(".")[0] in ("torch", "functorch")]
        return next((name for name in names if any(private(part) for part in name.split("."))), None)
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("torch", "functorch"):
        names = [*node.module.split("."), *(alias.name for alias in node.names)]
        return node.module if any(private(name) for name in names) else None
    if isinstance(node, ast.Attribute):
        names = chain(node)
        if names[:1] == ["torch"] and any(private(name) for name in names):
            return ".".join(names)
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own and (node.attr in TENSOR_NAMES or node.attr.startswith(("_saved_", "_raw_saved_"))):
            return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_name = node.value.startswith(("_saved_", "_raw_saved_", "torch._")) or node.value in TENSOR_NAMES
        return node.value if is_name else None
    return None


def places(source: Path) -> list[str]:
    tree = ast.parse(source.read_text())
    found = ((node, leans_on(node)) for node in ast.walk(tree))
    return [f"{source.relative_to(SOURCE)}:{node.lineno} {name}" for node, name in found if name]


def test_no_other_room_touches_a_private_name_of_torch():
    outside = [path for path in sorted(SOURCE.rglob("*.py")) if path.relative_to(SOURCE) not in ABOUT_TORCH]
    outside = [path for path in outside if path.relative_to(SOURCE).parts[0] != "_torch"]
    assert [place for path in outside for place in places(path)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch._C import _autograd",
        "from torch.autograd import _x",
        "torch._foreach_add_(a, b)",
        "node._saved_self",
        "tensor._version",
        "getattr(node, '_raw_saved_self')",
    ],
)
def test_the_lint_sees(code):
    assert any(leans_on(node) for node in ast.walk(ast.parse(code)))


@pytest.mark.parametrize("each", all_probes(), ids=lambda each: each.name)
def test_torch_does_what_we_need(each):
    assert each.fault() is None


def test_a_failed_probe_names_itself_and_what_it_breaks(monkeypatch):
    require("split")  # passes, and is kept
    require.cache_clear()
    probe.probe("torch._gone", expected="is there", features=("split", "pipeline"))(lambda: [][0])
    added = probe._PROBES[-1]
    try:
        with pytest.raises(UnsupportedTorch, match=r"torch\._gone must do what split and pipeline need.*IndexError"):
            require("split")
        require("hooks")  # another feature is not concerned
    finally:
        probe._PROBES.remove(added)
        require.cache_clear()
