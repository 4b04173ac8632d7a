"""The README's Python runs as pasted, prints what it says, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import ROOT, programs, run

README = (ROOT / "README.md").read_text()
BLOCKS = programs(README, apart=True)
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*/README.md"),
]


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_code_runs_as_pasted(index: int, tmp_path: Path) -> None:
    printed = run(BLOCKS[index], tmp_path)
    if BLOCKS[index].ranks > 1:  # the quick start, whose output is shown; the plan in it follows from times
        said = re.search(r"\$ torchrun [^\n]* train.py\n(.*?)```", README, re.DOTALL)
        assert said is not None
        losses, shown = (re.findall(r"step \d: loss (.*)", text) for text in (printed, said[1]))
        assert [float(loss) for loss in losses] == pytest.approx([float(loss) for loss in shown], abs=2e-3)
        assert len(shown) == 3


def test_there_is_code() -> None:
    assert BLOCKS


def test_it_is_short() -> None:
    assert README.count("\n") <= 131


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
