"""docs/backward_state.md says what is so, and the example runs as it says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sternway.state import BackwardState

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "backward_state.md").read_text()


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("make_backward_state", ROOT / "docs" / "make_backward_state.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.mark.parametrize("words", SCRIPT.CASES)
def test_every_row_is_in_the_table_and_ours_works(words: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {words} |")]
    assert row.endswith("| works |")
    if not words.startswith("Inductor"):  # test_state_hooks has it, with more
        assert SCRIPT.outcome(SCRIPT.Way("ours", BackwardState()), SCRIPT.CASES[words]) == "works"


def test_the_example() -> None:
    command = [sys.executable, ROOT / "examples" / "compiled_hooks.py", "--backend", "aot_eager", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("block") == 6
    assert "one graph, without a break, served every step" in done.stdout
