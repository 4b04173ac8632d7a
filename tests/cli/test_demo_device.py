"""Where the demo's ranks compute: what is chosen, and what is said. Real runs are in ``pipeline/test_demo_gpu.py``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from sternway.cli import app
from sternway.demo import choose_device
from sternway.errors import PipelineError


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
