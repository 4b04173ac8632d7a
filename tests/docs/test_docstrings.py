"""What docstrings list as arguments are arguments: the documentation site refuses others, and is not built in CI."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
Documented = ast.FunctionDef | ast.ClassDef


def documented(tree: ast.AST) -> Iterator[tuple[Documented, list[str]]]:
    """Functions and classes whose docstring has a list of arguments, and the names in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and "\nArgs:\n" in (text := ast.get_docstring(node) or ""):
            section = re.split(r"\n\n(?=\S)", text.split("\nArgs:\n", 1)[1])[0]
            yield node, re.findall(r"^    (\S[^:]*):", section, re.MULTILINE)


def parameters_of(node: Documented) -> set[str]:
    """What a function takes, or a class: its fields, or what its ``__init__`` or ``__new__`` takes."""
    if isinstance(node, ast.FunctionDef):
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {each.arg for each in every if each is not None}
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__new__")]
    return fields.union(*map(parameters_of, makers))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_listed_arguments_are_arguments(path: Path) -> None:
    for node, names in documented(ast.parse(path.read_text())):
        assert names, f"{node.name} has an empty list of arguments"
        unknown = [name for name in names if name.lstrip("*") not in parameters_of(node)]
        assert not unknown, f"{node.name} does not take {unknown}"
