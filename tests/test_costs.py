"""The table of costs names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from costs import COSTS, SEARCHING, marks

HERE = Path(__file__).parent


@pytest.mark.parametrize("key", [*(key for key in COSTS if not key.startswith("[")), *SEARCHING])
def test_every_key_is_a_test(key: str) -> None:
    file, _, name = key.partition("::")
    text = (HERE / file).read_text()
    assert re.search(rf"^ *def {name or 'test_'}", text, re.MULTILINE)


def test_marks() -> None:
    assert marks("pipeline/test_dist.py", "test_four_ranks") == {"dist"}
    assert marks("split/test_property.py", "test_random_networks") == {"slow"}
    assert marks("split/test_compiled.py", "test_autocast[inductor]") == {"slow"}
    assert marks("split/test_compiled.py", "test_autocast[eager]") == set()


@pytest.mark.parametrize("path", sorted(HERE.rglob("test_*.py")), ids=lambda path: path.relative_to(HERE).as_posix())
def test_what_starts_ranks_is_marked(path: Path) -> None:
    """A file that uses ``on_ranks`` or torchrun has a key in the table, or a test in it has."""
    if re.search(r"\bon_ranks\(|torch\.distributed\.run", path.read_text()) and path != Path(__file__):
        file = path.relative_to(HERE).as_posix()
        assert any(key.partition("::")[0] == file and "dist" in found for key, found in COSTS.items())
