"""For every test: the same random numbers, whatever ran before; and a real Chromium for those that ask for one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from browser import Browser

collect_ignore_glob = [] if find_spec("griffe") else ["atlas/*"]  # a GPU machine may have torch and pytest alone


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def _running_browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def browser(_running_browser: Browser) -> Iterator[Browser]:
    """One that must have had nothing to complain of when the test is over, and asked no network for anything."""
    _running_browser.errors.clear()
    _running_browser.requests.clear()
    yield _running_browser
    assert _running_browser.errors == []
    assert all(url.startswith(("file:", "about:")) for url in _running_browser.requests)
