"""torch's own samples of every operator and module: split equals a plain backward (``make opsweep`` tells more)."""

from __future__ import annotations

import pytest
from sweep import sweep

PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")  # torch's samples warn of much that they try on purpose
def test_every_operator_and_module(part: int) -> None:
    tally = sweep(lambda number: number % PARTS == part)
    assert tally.faults == []
    assert tally.comparisons > 5000  # the databases are where they were
