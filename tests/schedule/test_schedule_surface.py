"""What the room shows, what its examples say, and what it does not import."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import sternway.schedule

MODULES = [f"sternway.schedule.{m.name}" for m in pkgutil.iter_modules(sternway.schedule.__path__)]

SURFACE = {
    "Action",
    "Bottleneck",
    "Costs",
    "Event",
    "Op",
    "Overlap",
    "Schedule",
    "StageCosts",
    "Timeline",
    "check",
    "from_csv",
    "from_json",
    "make",
    "names",
    "simulate",
}


def test_the_public_surface_is_this():
    # The search has its own names, and its own test of them.
    assert set(sternway.schedule.__all__) - {"Comparison", "Row", "best", "lower_bound", "search"} == SURFACE
    assert all(hasattr(sternway.schedule, name) for name in sternway.schedule.__all__)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module):
    assert importlib.import_module(module).__doc__


def test_it_needs_nothing_but_the_standard_library():
    code = "import sys, sternway.schedule; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "scipy", "rich", "typer"} & set(run.stdout.split())
