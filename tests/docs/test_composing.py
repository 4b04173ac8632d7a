"""The table of docs/composing.md: each cell names a test that is there, and each refusal is an error of ours."""

from __future__ import annotations

import re

from pages import ROOT

PAGE = (ROOT / "docs" / "composing.md").read_text()
CELL = re.compile(r"\(\.\./(tests/[a-z_/]+\.py)#(\w+)\)")


def test_every_cell_names_a_test() -> None:
    cells = CELL.findall(PAGE)
    assert len(cells) > 30
    for path, name in cells:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{name} of {path}"


def test_every_refusal_is_an_error() -> None:
    refusals = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(refusals) > 8
    source = " ".join(path.read_text() for path in (ROOT / "src" / "sternway").rglob("*.py"))
    for text in refusals:
        assert text in source, text
