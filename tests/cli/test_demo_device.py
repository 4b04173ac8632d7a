"""Where the demo's ranks compute: what is chosen and said, and real runs on a GPU that ranks share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sternway.cli import app
from sternway.demo import choose_device
from sternway.errors import PipelineError

SMALL = ["--steps", "8", "--dim", "16", "--layers", "2", "--microbatches", "2", "--json"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    def have(gpus: int, nccl: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    return have


def test_a_gpu_for_each_rank_is_used(machine) -> None:
    machine(gpus=2)
    assert choose_device("auto", 2) == choose_device("cuda", 2) == ("cuda", "")
    assert choose_device("cpu", 2) == ("cpu", "")


def test_fewer_gpus_than_ranks_are_shared_only_if_asked_for(machine) -> None:
    machine(gpus=1)
    assert choose_device("auto", 2) == (
        "cpu",
        "2 ranks, and 1 GPU: on the CPU, as NCCL takes one rank on each GPU. To let them share, pass --device cuda.",
    )
    kind, remark = choose_device("cuda", 2)
    assert kind == "cuda"
    assert remark.startswith("2 ranks, and 1 GPU: they share, over sockets")


@pytest.mark.parametrize(("gpus", "nccl", "got"), [(0, True, "no CUDA device"), (2, False, "a torch without NCCL")])
def test_no_gpu_at_all(gpus: int, nccl: bool, got: str, machine) -> None:
    machine(gpus, nccl)
    assert choose_device("auto", 2) == ("cpu", "")
    with pytest.raises(PipelineError, match=rf"need a GPU and NCCL; got {got}. Fix: pass --device cpu"):
        choose_device("cuda", 2)


def test_the_command_says_what_is_wrong_with_a_device() -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "tpu"])
    assert result.exit_code == 2
    assert "must be auto, cpu or cuda; got tpu" in result.output


@pytest.mark.gpu
@needs_gpu
def test_two_ranks_share_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sternway", "demo", "--device", "cuda", "--ranks", "2", "--compared-steps", "1"]
    done = subprocess.run([*command, *SMALL, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["gradients_equal"]
    assert record["device"] == "cuda"
    assert all(record["peak_bytes"].values())


@pytest.mark.gpu
@needs_gpu
def test_killed_on_a_gpu_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sternway", "demo", "--chaos", "--device", "cuda", "--ranks", "2", "--kills", "1"]
    done = subprocess.run([*command, *SMALL, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["kills"], record["bit_identical"]) == (1, True)


@pytest.mark.gpu
@needs_gpu
def test_the_example_uses_a_gpu() -> None:
    example = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(example)]
    command += ["--steps", "11", "--dim", "32", "--schedule", "1f1b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "ranks: 1, on cuda" in done.stdout
    assert "step 10: loss" in done.stdout
