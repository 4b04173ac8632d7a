"""One meaning a name, and no room inside another: what a reader may rely on, checked over the syntax tree."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sternway"
FILES = sorted(SOURCE.rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported: ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside_of(name: str) -> str | None:
    """The room whose private module an imported name is of, if any; the root's private modules are for all."""
    parts = name.split(".")
    return parts[1] if parts[0] == "sternway" and any(private(part) for part in parts[2:]) else None


def test_a_class_name_is_defined_once() -> None:
    """Whoever reads ``Plan`` knows which; classes of one's own inside functions have names, too."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: found for name, found in sorted(places.items()) if len(found) > 1} == {}


def test_no_room_imports_the_inside_of_another() -> None:
    found = []
    for path in FILES:
        own = path.relative_to(SOURCE).parts[0]
        for name in imported(ast.parse(path.read_text())):
            room = inside_of(name)
            if room not in (None, own) and not private(str(room)):
                found.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert found == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_public_names_only(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [name for name in imported(tree) if any(map(private, name.split(".")))]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and private(node.attr)]
    assert names == []


@pytest.mark.parametrize(
    ("code", "room"),
    [
        ("from sternway.split._plan import x", "split"),
        ("from sternway.split import _plan", "split"),
        ("import sternway.pipeline.build._profile", "pipeline"),
        ("from sternway.split import rule", None),
        ("from torch.nn import _x", None),
    ],
)
def test_the_lint_sees(code: str, room: str | None) -> None:
    assert [inside_of(name) for name in imported(ast.parse(code))] == [room]
