"""A third of torch's own samples of every operator and module, as autograd has them; ``make opsweep`` runs all."""

from __future__ import annotations

import pytest
from sweep import sweep
from sweep_compiled import sweep_compiled
from sweep_saved import sweep_saved

EVERY = 3  # so many samples, one is run

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples warn of much that they try on purpose


def test_every_operator_and_module_split() -> None:
    tally = sweep(every=EVERY)
    assert tally.faults == []
    assert tally.comparisons > 3500  # the databases are where they were


def test_some_under_policies_for_saved_tensors() -> None:
    tally = sweep_saved(lambda number: number % 8 == 3, EVERY)
    assert tally.faults == []
    assert tally.comparisons > 2000


def test_some_compiled_and_split() -> None:
    tally = sweep_compiled(lambda number: number % 48 == 5)
    assert tally.faults == []
    assert tally.comparisons > 10
