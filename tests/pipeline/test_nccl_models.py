"""Unmodified models over real NCCL between small GPUs, each equal to its own backward on one."""

from __future__ import annotations

import pytest
import torch

from model_steps import run_all
from nccl_cases import said
from small_gpus import on_small_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # cuBLAS says once that it made a context
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_models_equal_their_own_backward(ranks: int) -> None:
    on_small_gpus(ranks, run_all, ranks, "cuda", said, timeout=200)
