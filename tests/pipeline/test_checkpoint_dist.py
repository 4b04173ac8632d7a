"""Checkpoints of real gloo processes: other numbers of ranks, copies on a mesh, one rank that cannot write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gloo import on_ranks
from sternway.demo import GPT
from sternway.errors import CheckpointError
from sternway.pipeline import CheckpointWarning, Pipeline
from sternway.pipeline.checkpoint import _tensors as tensors

VOCABULARY, LENGTH = 11, 6


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _pipe(schedule: str, **options: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, dim=8, heads=2, layers=6, length=LENGTH)
    model.head.weight = model.tokens.weight
    pipe = Pipeline(model, schedule=schedule, n_microbatches=4, loss_fn=_loss, **options)
    return pipe, torch.optim.AdamW(pipe.parameters(), 1e-2)


def _train(pipe: Pipeline, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(step))
        losses.append(float(pipe.step(tokens, target=tokens, loss_everywhere=True, record=False).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _saves(rank: int, schedule: str, directory: str) -> None:
    pipe, optimizer = _pipe(schedule)
    _train(pipe, optimizer, 0, 2)
    saving = pipe.save(directory, optimizer, 2, data={"rank": rank}, wait=False)
    losses = _train(pipe, optimizer, 2, 5)  # while it is written
    saving.wait()
    if rank == 0:
        Path(directory, "losses").write_text(repr(losses))
    pipe.close()


def _resumes(rank: int, schedule: str, directory: str, exactly: bool) -> None:
    expected = eval(Path(directory, "losses").read_text())
    pipe, optimizer = _pipe(schedule)
    for parameter in pipe.parameters():
        nn.init.zeros_(parameter)
    found = pipe.resume(directory, optimizer)
    assert (found.step, found.data) == (2, {"rank": 0})
    losses = _train(pipe, optimizer, 2, 5)
    assert losses == (expected if exactly else pytest.approx(expected, rel=1e-4))
    pipe.close()


def test_four_ranks_and_zb_v_to_two_and_1f1b_and_back(tmp_path: Path) -> None:
    on_ranks(4, _saves, "zb-v", str(tmp_path / "four"))
    on_ranks(4, _resumes, "zb-v", str(tmp_path / "four"), True)
    on_ranks(2, _resumes, "1f1b", str(tmp_path / "four"), False)
    on_ranks(2, _saves, "zb-h1", str(tmp_path / "two"))
    on_ranks(4, _resumes, "1f1b", str(tmp_path / "two"), False)
    on_ranks(1, _resumes, "1f1b", str(tmp_path / "two"), False)


def _copies(rank: int, directory: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pipe, optimizer = _pipe("zb-h1", mesh=mesh)
    _train(pipe, optimizer, 0, 1)
    pipe.save(directory, optimizer, 1)
    expected = _train(pipe, optimizer, 1, 3)
    assert pipe.resume(directory, optimizer).step == 1
    assert _train(pipe, optimizer, 1, 3) == expected
    pipe.close()


def test_copies_on_a_mesh(tmp_path: Path) -> None:
    on_ranks(4, _copies, str(tmp_path))


def _one_cannot(rank: int, directory: str) -> None:
    pipe, optimizer = _pipe("1f1b")
    pipe.save(directory, optimizer, 1)
    real = tensors.Writing.write

    def full(self: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank == 1:
        tensors.Writing.write = full
    with pytest.raises(CheckpointError, match=r"No space left on device \(on process 1\)"):
        pipe.save(directory, optimizer, 2)
    tensors.Writing.write = real
    if rank == 1:
        with pytest.raises(CheckpointError, match="got the step -1"):
            pipe.save(directory, optimizer, -1)
    else:
        with pytest.raises(CheckpointError, match=r"got the step -1 \(on process 1\)"):
            pipe.save(directory, optimizer, 3)
    assert pipe.resume(directory, optimizer).step == 1
    pipe.save(directory, optimizer, 4)
    if rank == 0:
        Path(directory, "step-00000004", "__1_0.distcp").write_bytes(b"")
        with pytest.warns(CheckpointWarning, match="is skipped"):
            assert pipe.resume(directory, optimizer).step == 1
    else:
        assert pipe.resume(directory, optimizer).step == 1
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp of 0 bytes"):
        pipe.resume(directory, optimizer, step=4)
    pipe.close()


def test_one_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    on_ranks(2, _one_cannot, str(tmp_path))
