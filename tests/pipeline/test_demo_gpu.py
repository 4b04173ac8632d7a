"""The demo, its chaos and the example on a GPU that ranks share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sternway.demo import ChaosOptions, DemoOptions, choose_device, train, train_with_kills

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = 2


def test_trains_on_a_gpu() -> None:
    device, _ = choose_device("cuda", RANKS)
    assert device == "cuda"
    outcome = train(
        DemoOptions(ranks=RANKS, steps=20, dim=32, layers=4, microbatches=4, compared_steps=1, device=device)
    )
    assert outcome.gradient_error < 1e-3
    assert outcome.losses[-1] < outcome.losses[0]
    assert all(outcome.peaks.values())
    assert {name.split()[0] for name in outcome.seconds} == {"sternway", "torch"}


def test_killed_on_a_gpu_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    options = ChaosOptions(folder=str(tmp_path), steps=8, dim=16, layers=2, microbatches=2, device="cuda")
    calm, disturbed = train_with_kills(options, ranks=RANKS, kills=1)
    assert len(disturbed.of("kill")) == 1
    assert calm.weights
    assert disturbed.weights == calm.weights


def test_the_example_uses_a_gpu() -> None:
    example = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(example)]
    command += ["--steps", "11", "--dim", "32", "--schedule", "1f1b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks: 1, on cuda" in done.stdout
    assert "step 10: loss" in done.stdout
