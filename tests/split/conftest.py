"""Tests of the split, also with the extension in C++."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sternway import split
from sternway.errors import UnsupportedTorch

BOTH = (
    "test_asked_gradients",
    "test_branches",
    "test_bugs",
    "test_checkpoint",
    "test_exact",
    "test_held",
    "test_hidden_hooks",
    "test_hook_order",
    "test_hooks",
    "test_inputs_outputs",
    "test_models",
    "test_modes",
    "test_odd_tensors",
    "test_parameters",
    "test_pending",
    "test_property",
    "test_random_graphs",
    "test_rules",
    "test_rules_modern",
    "test_stage",
    "test_threads",
)
"""Files whose tests run both ways."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__ in BOTH:
        metafunc.parametrize("_way", ["python", "native"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether the split runs in Python or in C++."""
    if getattr(request, "param", "python") == "native":
        try:
            split.accelerate()
        except UnsupportedTorch as error:
            pytest.skip(str(error))
        torch.compiler.reset()  # Dynamo would take what it compiled for the first way
    yield
    split.accelerate(False)
