"""For every test: the same random numbers, whatever ran before."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
