"""What a file's page and a folder's page say beyond definitions: design, usage, tests, history, where to start."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sternway import atlas
from sternway.errors import AtlasError

FILES = {
    "pkg/__init__.py": '"""A package for adding."""\nfrom pkg.sums import Adder, add\n\n__all__ = ["Adder", "add"]\n',
    "pkg/sums.py": '''\
"""Add numbers.

See `Adder`, which uses `add`.
"""
from typing import overload
from pkg._base import Base

__all__ = ["Adder", "add"]
LIMIT: int = 3
"""How many at most."""


@overload
def add(a: int, b: int) -> int: ...
@overload
def add(a: str, b: str) -> str: ...
def add(a, b):
    """Add two things.

    Args:
        a: the first.
        b: the second; see ``LIMIT``.
    """
    return _checked(a) + b


def _checked(a):
    if a is None:
        raise TypeError("None")
    return a


class Adder(Base):
    """Adds with `add`. Its `total` is kept."""

    total: int = 0

    @property
    def double(self) -> int:
        """Twice the `total`, without regard to a."""
        return 2 * self.total

    def more(self, b: int) -> None:
        """Add ``b`` to `total`; `double` grows."""
        self.total = add(self.total, b)
''',
    "pkg/_base.py": "class Base:\n    def describe(self):\n        return 'base'\n",
    "pkg/_script.py": 'if __name__ == "__main__":\n    print(1)\n',
    "examples/use.py": "from pkg import add\n\nresult = add(1, 2)\n",
    "benchmarks/main.py": "from pkg import add\n\nfor i in range(3):\n    add(\n        i,\n        i,\n    )\n",
    "tests/test_add.py": """\
from pkg.sums import Adder, add


def test_add():
    assert add(1, 2) == 3


def test_adder():
    Adder()
""",
    "pyproject.toml": "[project]\nname = 'x'\n",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which two files always change together."""
    root = tmp_path_factory.mktemp("pages")
    source = root / "repo"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number in range(4):
        (source / "pkg" / "sums.py").write_text(FILES["pkg/sums.py"] + "\n" * number)
        (source / "pkg" / "_base.py").write_text(FILES["pkg/_base.py"] + "\n" * number)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", str(number)], check=True)
    (source / "pkg" / "sums.py").write_text(FILES["pkg/sums.py"])
    report = atlas.build(source, root / "out")
    assert report.ok
    return root / "out"


def _section(page: Path, title: str) -> str:
    match = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    return match[1] if match else ""


def _line(start: str) -> int:
    """The line of the module that starts so."""
    rows = FILES["pkg/sums.py"].split("\n")
    return next(number for number, row in enumerate(rows, 1) if row.startswith(start))


def test_the_docstring_is_whole_and_its_names_are_links(out: Path) -> None:
    overview = _section(out / "pkg/sums.py_docs.md", "Overview")
    assert (
        "Add numbers.\n\nSee [`Adder`](../../repo/pkg/sums.py#L33), which uses [`add`](../../repo/pkg/sums.py#L14)."
        in overview
    )
    breakdown = _section(out / "pkg/sums.py_docs.md", "Detailed breakdown")
    assert "| `b` | the second; see [`LIMIT`](../../repo/pkg/sums.py#L9). |" in breakdown
    total, double = _line("    total: int"), _line("    def double")
    said = f"Add `b` to [`total`](../../repo/pkg/sums.py#L{total}); [`double`](../../repo/pkg/sums.py#L{double}) grows."
    assert said in breakdown
    assert "without regard to a." in breakdown
    assert "| `LIMIT` | [line 9](../../repo/pkg/sums.py#L9) | `int` | `3` | How many at most. |" in breakdown


def test_overloads_properties_and_inherited_members(out: Path) -> None:
    breakdown = _section(out / "pkg/sums.py_docs.md", "Detailed breakdown")
    assert breakdown.count("@overload") == 2
    assert breakdown.count("### function `add`") == 1
    assert "#### property `Adder.double`\n\n```python\n@property\ndef double(self) -> int\n```" in breakdown
    assert "Inherited from [`Base`](../../repo/pkg/_base.py#L1): describe." in breakdown


def test_without_a_docstring_the_page_says_that_it_is_derived(out: Path) -> None:
    overview = _section(out / "pkg/_base.py_docs.md", "Overview")
    assert "**Derived from the code:** defines the class [`Base`](../../repo/pkg/_base.py#L1)" in overview
    breakdown = _section(out / "pkg/sums.py_docs.md", "Detailed breakdown")
    row = next(line for line in breakdown.split("\n") if line.startswith("| `_checked`"))
    assert "returns `a`; raises `TypeError`; called at [line 24]" in row


def test_layers_and_diagrams(out: Path) -> None:
    design = _section(out / "pkg/sums.py_docs.md", "Architecture and design")
    assert design.startswith("Layer 2 of 4 by imports: it reaches 1 file of the tree, and 4 reach it.")
    assert 'n2["pkg/sums.py"]' in design
    html = (out / "pkg/sums.py_docs.html").read_text()
    assert html.count('<svg class="diagram"') == 2
    assert re.search(r"<a href=_base.py_docs.html><rect [^<]*/><text [^<]*>pkg/_base.py</text></a>", html)
    assert "<a href=sums.py_docs.html#d-add>" in html


def test_usage_comes_from_examples_first_and_is_complete(out: Path) -> None:
    usage = _section(out / "pkg/sums.py_docs.md", "Usage examples")
    first, second = re.findall(r"\[`add`\][^\n]* at \[([^\]]*)\][^\n]*\n\n```python\n(.*?)\n```", usage, re.DOTALL)[:2]
    assert first == ("examples/use.py:3", "result = add(1, 2)")
    assert second == ("tests/test\\_add.py:5", "assert add(1, 2) == 3")


def test_tests_reach_through_calls(out: Path) -> None:
    testing = _section(out / "pkg/sums.py_docs.md", "Testing")
    assert "| [`add`](../../repo/pkg/sums.py#L14) | [test\\_add](../../repo/tests/test_add.py#L4) |" in testing
    assert re.search(r"\| \[`_checked`\].* \[test\\_add\]\(.*\) \(2 calls deep, through add\) \|", testing)
    assert "Test files that import it: [tests/test\\_add.py:1]" in testing


def test_files_that_change_together(out: Path) -> None:
    related = _section(out / "pkg/sums.py_docs.md", "Related files")
    assert "| [pkg/\\_base.py](_base.py_docs.md) | changed with it in 4 of its 4 commits |" in related


def test_where_to_start(out: Path) -> None:
    start = _section(out / "index.md", "Where to start")
    order = re.findall(r"^\d+\. \[([^\]]+)\]", start, re.MULTILINE)
    assert order[:2] == ["pkg/\\_\\_init\\_\\_.py", "pkg/sums.py"]
    assert order.index("pkg/\\_base.py") < order.index("pkg/\\_script.py") < order.index("benchmarks/main.py")
    assert "A package for adding." in _section(out / "index.md", "Folders")
    assert "Imports inside this folder" in (out / "pkg/index.html").read_text()


def test_a_loop_that_a_loop_calls_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(
        "def inner(rows):\n    for row in rows:\n        step(row)\n\n\ndef step(row): ...\n\n\n"
        "def outer(tables):\n    for rows in tables:\n        inner(rows)\n"
    )
    atlas.build(tmp_path / "src", tmp_path / "out")
    found = _section(tmp_path / "out/a.py_docs.md", "Performance considerations")
    assert "line 3 calls a.step in the loop at line 2; a loop calls inner at [a.py:11](../src/a.py#L11)" in found
    (tmp_path / "src" / "a.py").write_text("def quiet(rows):\n    return [row for row in rows]\n")
    atlas.build(tmp_path / "src", tmp_path / "out")
    assert "Performance" not in (tmp_path / "out/a.py_docs.md").read_text()


def test_links_lead_to_a_code_host(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a b.py").write_text("def f():\n    return 1\n")
    address = "https://host/owner/repo/blob/main/src"
    assert atlas.build(tmp_path / "src", tmp_path / "out", source_url=address).ok
    text = (tmp_path / "out/a~20b.py_docs.md").read_text()
    assert "(https://host/owner/repo/blob/main/src/a%20b.py#L1)" in text
    assert ".html" not in text
    assert atlas.check(tmp_path / "src", tmp_path / "out", source_url=address).ok
    assert not atlas.check(tmp_path / "src", tmp_path / "out").ok
    page = tmp_path / "out/a~20b.py_docs.md"
    page.write_text(text.replace("#L1)", "#L99)"))
    broken = atlas.check(tmp_path / "src", tmp_path / "out", source_url=address).broken
    assert [item.target for item in broken] == [f"{address}/a%20b.py#L99"]
    with pytest.raises(AtlasError, match="--source-url must be the address of a folder"):
        atlas.build(tmp_path / "src", tmp_path / "out", source_url="javascript:x")


def test_no_page_is_too_large(tmp_path: Path) -> None:
    """A file of 3,000 documented functions, and as many names."""
    (tmp_path / "src").mkdir()
    text = "".join(
        f'def {"_" * (i % 2)}function_{i}(first: int, second: str = "x") -> int:\n'
        f'    """Do number {i}.\n\n    At length.\n    """\n'
        f"    variable_{i} = first\n    return variable_{i}\n\n\n"
        for i in range(1500)
    )
    (tmp_path / "src" / "big.py").write_text(text)
    assert atlas.build(tmp_path / "src", tmp_path / "out").ok
    pages = [path for path in (tmp_path / "out").rglob("*.*") if path.suffix in (".md", ".html")]
    assert [
        path.name for path in pages if path.stat().st_size > 300_000 and not path.name.endswith("_source.html")
    ] == []
    page = (tmp_path / "out/big.py_docs.md").read_text()
    assert "so this page is brief: as Markdown it names its own lines without links" in page
    assert "#L1)" not in page
    assert "href=#L1>" in (tmp_path / "out/big.py_docs.html").read_text()
    listed = "".join(path.read_text() for path in sorted((tmp_path / "out").glob("big.py_kw*.md")))
    assert all(f"`variable_{i}`" in listed for i in range(1500))


def test_the_index_of_a_folder_with_one_folder_leads_there(tmp_path: Path) -> None:
    (tmp_path / "src" / "pkg" / "inner").mkdir(parents=True)
    (tmp_path / "src" / "pkg" / "a.py").write_text("def first(): ...\n")
    (tmp_path / "src" / "pkg" / "inner" / "b.py").write_text("def second(): ...\n")
    report = atlas.build(tmp_path / "src", tmp_path / "out")
    assert report.ok
    assert "All definitions are below [pkg](pkg/sub.md)." in (tmp_path / "out/sub.md").read_text()
    assert "`first` function [a.py:1]" in (tmp_path / "out/pkg/sub.md").read_text()
    assert "`second` function [b.py:1]" in (tmp_path / "out/pkg/inner/sub.md").read_text()


def test_what_a_class_is_told_from_outside(tmp_path: Path) -> None:
    """A docstring that is assigned, and the types of a class's parameters, which its ``__init__`` has."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text(
        "class Step:\n    def __init__(self, rate: float = 0.1): ...\n\n"
        "class Stop: ...\n\n"
        'Step.__doc__ = "Take a step.\\n\\nArgs:\\n" f"    {Stop}\\n    rate: how far" + f" {Stop}"\n'
        '\n\nLAST = 1\n\n"""\nNot of LAST.\n"""\nNEXT = 2\n"""The next."""\n'
    )
    assert atlas.build(tmp_path / "src", tmp_path / "out").ok
    page = (tmp_path / "out/a.py_docs.md").read_text()
    assert "Take a step.\n" in page
    assert "| `rate` | `float` | `0.1` | how far … |" in page
    assert "| `LAST` | [line 9](../src/a.py#L9) | `1` |  |" in page  # the string is for the next name, if for any
    assert "| `NEXT` | [line 14](../src/a.py#L14) | `2` | The next. |" in page
    assert "defines the classes [`Step`](../src/a.py#L1), [`Stop`](../src/a.py#L4)" in page
