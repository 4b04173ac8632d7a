"""Ranks that do not do the same: an error on all of them, and neither a wait for ever nor numbers of no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gloo import on_ranks
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import Pipeline
from sternway.pipeline.faults._calls import Calls
from sternway.pipeline.faults._lost import LostRank, Position
from sternway.pipeline.faults._signs import SignsOfLife
from sternway.pipeline.step._guard import Guard
from sternway.pipeline.transport._facts import StepFacts, sample_checksum

DIM = 4


def made(*names: str) -> Calls:
    calls = Calls()
    for name in names:
        calls.note(name)
    return calls


def test_two_names_for_one_call() -> None:
    mine = made("step", "clip_grad_norm_")
    assert mine.last() == (2, "clip_grad_norm_")
    assert mine.other(2, "step") == ("clip_grad_norm_", "step")
    assert mine.other(1, "evaluate") == ("step", "evaluate")  # seen late
    assert mine.other(2, "clip_grad_norm_") is None
    assert mine.other(0, "") is None  # not as far as this rank
    assert mine.other(3, "step") is None  # farther: whoever looks at this rank's sign will see


def test_a_rank_that_closed_makes_no_more_calls() -> None:
    mine = made("step", "save")
    assert mine.other(1, None) == ("save", "close")
    assert mine.other(2, None) is None
    assert mine.other(3, None) is None


def test_only_the_last_calls_are_kept() -> None:
    mine = made("evaluate", *["step"] * 1000)
    assert mine.other(1, "step") is None  # forgotten
    assert mine.other(1000, "evaluate") == ("step", "evaluate")


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("suspicious", [False, True])
def test_signs_of_life_tell_of_calls(closed: bool, suspicious: bool) -> None:
    store = dist.HashStore()
    here, there = (SignsOfLife(store, rank, 2, 6.0, lambda: 0.0) for rank in range(2))
    for signs in (here, there):
        signs.calls.note("step")
    here.suspicious = suspicious
    there.write(Position(0))
    assert here.look(Position(0)) is None
    here.calls.note("save")
    if closed:
        there.write_closed()
    else:
        there.calls.note("evaluate")
        there.write(Position(0))
    lost = here.look(Position(0))
    assert lost == LostRank(None, f"save on rank 0, {'close' if closed else 'evaluate'} on rank 1", apart=True)
    assert LostRank.from_json(lost.to_json()) == lost


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))


def pipe_of(model: nn.Module) -> Pipeline:
    return Pipeline(model, schedule="zb-h1", n_microbatches=2, loss_fn=F.mse_loss)


def one_alone(rank: int, way: str, folder: str) -> None:
    """The first rank makes a call that the other one does not make."""
    pipe, x = pipe_of(model()), torch.ones(4, DIM)
    optimizer = torch.optim.SGD(pipe.parameters())
    pipe.step(x, target=x)
    alone = {
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "save": lambda: pipe.save(folder, optimizer, 1),
        "step": lambda: pipe.step(x, target=x),
    }[way]
    if rank == 1 and way == "step":  # it has no more batches
        return pipe.close()
    got = f"got {way} on rank 0, {'close' if way == 'step' else 'step'} on rank 1"
    with pytest.raises(LostRankError, match=rf"all ranks must make the same calls.*; {got}|got step on rank 1, {way}"):
        alone() if rank == 0 else pipe.step(x, target=x)
    with pytest.raises(PipelineError, match="this pipeline is closed, because it failed"):
        pipe.step(x, target=x)
    return None


@pytest.mark.parametrize("way", ["clip_grad_norm_", "save", "step"])
def test_a_call_that_one_rank_makes_alone(way: str, tmp_path: Path) -> None:
    on_ranks(2, one_alone, way, str(tmp_path), timeout=120)


def stop_alone(rank: int, who: int) -> None:
    """One rank stops to tune: the other one would gather times, and search, without it.

    Whichever is seen first is the error: what the first rank tells of the step, or the call in the signs of life.
    """
    x = torch.ones(4, DIM)
    pipe = Pipeline(model(), schedule="auto", n_microbatches=2, loss_fn=F.mse_loss, sample=x[:2], sample_target=x[:2])
    for _ in range(4):
        pipe.step(x, target=x)
    if rank == who:
        pipe.stop_tuning()
    got = "a call here, no call on the first rank" if who else "no call here, a call on the first rank"
    told = f"all ranks must call stop_tuning after the same step, or none; got {got}"
    with pytest.raises(PipelineError, match=f"{told}|step after stop_tuning on rank {who}|got step on rank"):
        pipe.step(x, target=x)


@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_stops_to_tune(who: int) -> None:
    on_ranks(2, stop_alone, who, timeout=120)


def stop_one_copy(rank: int) -> None:
    """One of two copies stops to tune: the other one would wait for its times."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    x = torch.ones(4, DIM)
    options: dict[str, Any] = {"sample": x[:2], "sample_target": x[:2], "mesh": mesh, "heartbeat_timeout": 6}
    pipe = Pipeline(model(), schedule="auto", n_microbatches=2, loss_fn=F.mse_loss, **options)
    pipe.step(x, target=x)
    if mesh["dp"].get_local_rank() == 1:
        pipe.stop_tuning()

    def train() -> None:
        for _ in range(100):
            pipe.step(x, target=x)

    with pytest.raises(PipelineError, match="step after stop_tuning on rank"):
        train()


def test_one_copy_stops_to_tune() -> None:
    on_ranks(4, stop_one_copy, timeout=120)


def different(rank: int) -> None:
    torch.manual_seed(rank)
    match = "the model must have the same weights on every rank.*got other values of 0.weight on rank 1 than on rank 0"
    with pytest.raises(PipelineError, match=match):
        pipe_of(model())
    torch.manual_seed(0)
    pipe, x, other = pipe_of(model()), torch.ones(4, DIM), torch.full((4, DIM), float(rank))
    with pytest.raises(PipelineError, match="the target must belong to the batch"):
        pipe.step(x, target=other)
    pipe = pipe_of(model())
    pipe.step(*([x] if rank == 0 else []), target=None if rank == 0 else other)  # each passes what is its own
    pipe.step(x, target=x)
    pipe.close()


def test_weights_and_targets_that_differ() -> None:
    on_ranks(2, different, timeout=120)


def test_a_target_that_is_not_known_is_not_compared() -> None:
    for first, here in ((0, 5), (5, 0), (5, 5)):
        StepFacts(target=first).check(StepFacts(target=here))
    with pytest.raises(PipelineError, match="another target here than there"):
        StepFacts(target=4).check(StepFacts(target=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_checksum_sees_rows_in_another_order(dtype: torch.dtype) -> None:
    rows = (torch.arange(4096 * 64) * 2654435761 % 4096 > 2000).reshape(4096, 64).to(dtype)
    assert sample_checksum(rows) == sample_checksum(rows.clone())
    assert sample_checksum(rows) != sample_checksum(rows[torch.randperm(4096)])
    assert sample_checksum(rows[:0]) != sample_checksum(rows[:1])
    assert sample_checksum(rows[0, 0]) == sample_checksum(rows[0, 0].clone())


def test_errors_of_code_are_not_taken_for_lost_connections() -> None:
    class Watched:
        watch = object()

    guard = Guard(Watched(), 0, Path())  # type: ignore[arg-type]  # as much of a transport as is asked for
    for kind in (RecursionError, NotImplementedError):
        with pytest.raises(kind, match="in the code here"), guard.other_ranks():
            raise kind("in the code here")
