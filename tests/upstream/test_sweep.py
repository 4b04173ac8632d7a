"""A third of torch's own samples of every operator and module, as autograd has them; ``make opsweep`` runs all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sweep import sweep
from sweep_compiled import sweep_compiled
from sweep_saved import sweep_saved

EVERY = 3  # so many samples, one is run

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples warn of much that they try on purpose


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    """torch notes the stack at every sample: pytest's is deep, which takes most of the time; a thread's is not."""
    with ThreadPoolExecutor(1) as running:
        yield running


def test_every_operator_and_module_split(thread: ThreadPoolExecutor) -> None:
    tally = thread.submit(sweep, every=EVERY).result()
    assert tally.faults == []
    assert tally.comparisons > 4000  # the databases are where they were


def test_some_under_policies_for_saved_tensors(thread: ThreadPoolExecutor) -> None:
    tally = thread.submit(sweep_saved, lambda number: number % 8 == 3, EVERY).result()
    assert tally.faults == []
    assert tally.comparisons > 2000


def test_some_compiled_and_split(thread: ThreadPoolExecutor) -> None:
    tally = thread.submit(sweep_compiled, lambda number: number % 48 == 5).result()
    assert tally.faults == []
    assert tally.comparisons > 10
