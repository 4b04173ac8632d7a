"""Every Python block of the docs runs: a page is a program, under torchrun where it needs several ranks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import ROOT, Program, programs, run

FOUND = {
    f"{page.relative_to(ROOT / 'docs')} {index}".removesuffix(" 0"): program
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for index, program in enumerate(programs(page.read_text()))
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_page_runs(program: Program, tmp_path: Path) -> None:
    missing = [name for name in program.needs if not find_spec(name)]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)}: make zoo installs them")
    run(program, tmp_path)


def test_no_block_is_left_out() -> None:
    assert len(FOUND) >= 10
    assert sum(program.not_run for program in FOUND.values()) == 0
