"""No barrier separates steps: a rank begins the next one while another has not ended this one. Without timing."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from number_cases import Tell
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM, STAGES, LIMIT = 8, 3, 60.0


def wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < end, "the first rank did not begin its next step"
        time.sleep(0.01)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(DIM, DIM) for _ in range(STAGES)]


def run_ahead(rank: int, name: str, folder: str, how: str) -> None:
    """The last rank begins its second step only after the first rank has begun its own."""
    count, told = 4, Path(folder) / "told"
    mine, reference = layers(), nn.Sequential(*layers())
    module = nn.Sequential(Tell(told, count + 1), mine[rank]) if rank == 0 else mine[rank]
    pipe = Pipeline({rank: module}, schedule=name, n_microbatches=count, loss_fn=F.mse_loss)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (mine[rank], reference)]
    torch.manual_seed(1)
    for number in range(3):
        x, target = torch.randn(8, DIM), torch.randn(8, DIM)
        if number == 1 and rank == STAGES - 1:
            wait_for(told)
        result = pipe.step(x, target=target, loss_everywhere=how == "loss", record=how != "no record")
        loss = F.mse_loss(reference(x), target)
        loss.backward()
        if how == "loss":
            torch.testing.assert_close(result.loss, loss.detach())
        if how != "optimizer":
            assert_same_grads(mine[rank], reference[rank])
            continue
        pipe.optimizer_step(optimizers[0], max_norm=1e6)
        optimizers[1].step()
        optimizers[1].zero_grad()
    if how != "no record":
        assert result.timeline is not None
        assert result.timeline.makespan > 0
    pipe.close()
    torch.testing.assert_close(mine[rank].weight, reference[rank].weight)


@pytest.mark.parametrize("how", ["no record", "loss", "optimizer"])
def test_the_first_rank_runs_ahead(tmp_path: Path, how: str) -> None:
    on_ranks(STAGES, run_ahead, "zb-h1", str(tmp_path), how, timeout=2 * LIMIT)


def run_only_one_looks(rank: int) -> None:
    pipe = Pipeline({rank: layers()[rank]}, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss)
    result = pipe.step(torch.randn(4, DIM), target=torch.randn(4, DIM))
    if rank == 1:
        assert len(result.timeline.events) == STAGES
    torch.distributed.barrier()
    pipe.close()


def test_a_timeline_needs_no_other_rank_to_look() -> None:
    on_ranks(STAGES, run_only_one_looks, timeout=LIMIT)


# Mismatches


def run_mismatch(rank: int, last: dict[str, Any], message: str) -> None:
    """The last rank calls ``step`` with other arguments: it says so, and the others hear of it in the same step."""
    pipe = Pipeline({rank: layers()[rank]}, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss)
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    pipe.step(x, target=target)
    here = {"target": target, **(last if rank == STAGES - 1 else {})}
    with pytest.raises(PipelineError if rank == STAGES - 1 else LostRankError, match=message):
        pipe.step(x, **here)
    with pytest.raises(PipelineError, match="this pipeline is closed"):
        pipe.step(x, target=target)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"record": False}, "the same loss_everywhere, record and nonfinite"),
        ({"target": None}, "training needs a loss and a target"),
        ({"target": torch.zeros(2, DIM)}, "the target must have as many rows as the batch"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank(last: dict[str, Any], message: str) -> None:
    on_ranks(STAGES, run_mismatch, last, message, timeout=LIMIT)


def run_no_optimizer_step(rank: int) -> None:
    module = layers()[rank]
    pipe = Pipeline({rank: module}, schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss)
    x, target = torch.randn(4, DIM), torch.randn(4, DIM)
    pipe.step(x, target=target)
    if rank != 1:
        pipe.optimizer_step(torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(PipelineError if rank == 1 else LostRankError, match="all ranks must call optimizer_step"):
        pipe.step(x, target=target)


def test_an_optimizer_step_on_some_ranks_alone() -> None:
    on_ranks(STAGES, run_no_optimizer_step, timeout=LIMIT)


def run_mistake_on_the_first(rank: int) -> None:
    mine, reference = layers(), nn.Sequential(*layers())
    pipe = Pipeline({rank: mine[rank]}, schedule="1f1b", n_microbatches=4, loss_fn=F.mse_loss)
    with pytest.raises(PipelineError, match="the batch cannot be cut along dimension 0 into 4 microbatches"):
        pipe.step(torch.zeros(3, DIM), target=torch.zeros(3, DIM))
    x, target = torch.randn(8, DIM), torch.randn(8, DIM)
    pipe.step(x, target=target)  # nobody had begun
    F.mse_loss(reference(x), target).backward()
    assert_same_grads(mine[rank], reference[rank])
    pipe.close()


def test_after_a_mistake_on_the_first_rank_the_pipeline_can_be_used() -> None:
    on_ranks(STAGES, run_mistake_on_the_first, timeout=LIMIT)


# Steps that are run again, because the optimizer step before was wrong


class Stateful(nn.Module):
    """Has state that a forward changes: running means, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x)))


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_a_step_on_trial_equals_one_that_waits(max_norm: float) -> None:
    """Clipped or not: the same parameters, running means and losses as with ``clip_grad_norm_`` and no trial."""
    torch.manual_seed(0)
    build: dict[str, Any] = {"schedule": "zb-h1", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss}
    first = nn.ModuleList([Stateful(), Stateful()])
    second = copy.deepcopy(first)
    pipes = [Pipeline({0: s[0], 1: s[1]}, **build, transport=LocalTransport()) for s in (first, second)]
    optimizers = [torch.optim.SGD(stages.parameters(), 0.1, momentum=0.9) for stages in (first, second)]
    for _ in range(4):
        x, target = torch.randn(8, DIM), torch.randn(8, DIM)
        results = [pipe.step(x, target=target) for pipe in pipes]
        torch.testing.assert_close(results[0].loss, results[1].loss)
        pipes[0].optimizer_step(optimizers[0], max_norm=max_norm)
        pipes[1].clip_grad_norm_(max_norm)
        optimizers[1].step()
        optimizers[1].zero_grad()
    pipes[0].settle()
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_running_means_survive_a_step_with_parameters_that_are_not_finite() -> None:
    torch.manual_seed(0)
    stages = {0: Stateful(), 1: Stateful()}
    pipe = Pipeline(stages, schedule="1f1b", n_microbatches=2, ranks=2, loss_fn=F.mse_loss, transport=LocalTransport())
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    x, target = torch.randn(8, DIM), torch.randn(8, DIM)
    pipe.step(x, target=target)
    next(iter(pipe.parameters())).grad.fill_(float("inf"))
    pipe.optimizer_step(optimizer, nonfinite="skip")
    result = pipe.step(x, target=target)
    assert pipe.skipped == 1
    assert torch.isfinite(result.loss)
    for stage in stages.values():
        assert all(torch.isfinite(value).all() for value in stage.state_dict().values())
