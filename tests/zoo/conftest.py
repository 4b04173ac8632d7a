"""For tests of other people's models: their warnings are not ours to mend."""

from __future__ import annotations

from pathlib import Path

import pytest

import gloo
import zoo.libraries  # noqa: F401 - before any of the libraries

gloo.PRELOADED.append("zoo.models")
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
