"""For every test: the same random numbers and one thread, whatever ran before, and marks that say what it costs.

``HYPOTHESIS_PROFILE=explore`` draws other examples in every run; otherwise they are the same everywhere.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it; workers and processes of tests inherit it

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from browser import Browser
from costs import SEARCHING, marks

HERE = Path(__file__).parent
collect_ignore_glob = []  # a GPU machine may have torch and pytest alone
if not (find_spec("griffe") and find_spec("tree_sitter")):
    collect_ignore_glob.append("atlas/*")
if not find_spec("timm"):
    collect_ignore_glob.append("zoo/*")  # make zoo installs what these need

if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, import no file without such tests: GPU machines may lack what it needs, and have little time."""
    if config.option.markexpr == "gpu" and collection_path.match("test_*.py"):
        return "pytest.mark.gpu" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE).as_posix() if HERE in item.path.parents else ""
        found = marks(path, item.name)
        if "browser" in getattr(item, "fixturenames", ()):
            found.add("browser")
        if config.pluginmanager.hasplugin("_cov") and (path in SEARCHING or found):
            found.add("no_cover")
        for mark in sorted(found):
            item.add_marker(mark)
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("dist")}
    items.sort(key=lambda item: item.path not in long)  # first, so that no worker is left alone with one at the end


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Hide what is alive before a file's tests from the collector: it would walk millions of objects, often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def _running_browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def browser(_running_browser: Browser) -> Iterator[Browser]:
    """A Chromium; at the end, the pages must have logged no error and requested nothing from a network."""
    _running_browser.errors.clear()
    _running_browser.requests.clear()
    yield _running_browser
    assert _running_browser.errors == []
    assert all(url.startswith(("file:", "about:", "data:", "blob:")) for url in _running_browser.requests)
