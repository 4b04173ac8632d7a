"""Schedules with OFFLOAD and RELOAD, run: the same gradients, in less memory, on one process and on two."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from sternway import schedule
from sternway._torch.memory import OperationCounter
from sternway.errors import PipelineError, SavedError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.build._partition import lay_out
from sternway.pipeline.build._room import rooms
from sternway.pipeline.step._movers import Movers
from sternway.schedule import Costs, Schedule, Upkeep

DIM, COUNT = 32, 6


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return gpt(DIM, 4)


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2 * COUNT, 32, DIM)


def away(name: str, limit: float) -> Schedule:
    plain = schedule.make(name, ranks=2, microbatches=COUNT)
    moved = schedule.offloaded(plain, Costs(offload=0.5, memory_after_I=0.2), memory_limit=limit)
    assert any(isinstance(step, Upkeep) for steps in moved.actions for step in steps)
    return moved


def grads_and_peak(plan: Schedule, folder: Path | None) -> tuple[list[Tensor], int]:
    model, x = blocks(), batch()
    pipe = Pipeline(
        model, schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport(), offload_to=folder
    )  # fmt: skip
    pipe.step(x, target=x)
    grads = [p.grad.clone() for p in model.parameters()]
    with OperationCounter() as counter:
        pipe.step(x, target=x)
        before = counter.peak = counter.now
        pipe.step(x, target=x)
    pipe.evaluate(x, target=x)  # which moves nothing
    pipe.close()
    return grads, counter.peak - before


@pytest.mark.parametrize(("name", "limit"), [("gpipe", 2.0), ("1f1b", 1.0), ("zb-h1", 1.4), ("zb-v", 1.5)])
def test_the_same_bits_in_less_memory(name: str, limit: float, tmp_path: Path) -> None:
    plain, most = grads_and_peak(schedule.make(name, ranks=2, microbatches=COUNT), None)
    moved, less = grads_and_peak(away(name, limit), tmp_path)
    alone, x = blocks(), batch()
    F.mse_loss(alone(x), x).backward()
    for one, other, reference in zip(plain, moved, alone.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(other, reference.grad, rtol=1e-4, atol=1e-6)
    assert less < most
    assert not list(tmp_path.iterdir())


def disk_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith(("sternway-write", "sternway-read"))}


def most_at_once(plan: Schedule) -> int:
    """The most microbatches of the first rank that are between F and their backward, of those that are moved."""
    now, most = set(), 0
    for step in plan.actions[0]:
        for action in step.actions:
            if (0, action.microbatch) in plan.moved(0):
                (now.add if action.op == "F" else now.discard)(action.microbatch)
        most = max(most, len(now))
    return most


def test_policies_serve_again_and_end_with_the_pipeline(tmp_path: Path) -> None:
    before, x, plan = disk_threads(), batch(), away("1f1b", 1.0)
    pipe = Pipeline(
        blocks(), schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport(), offload_to=tmp_path
    )
    for _ in range(3):
        pipe.step(x, target=x)
    (movers,) = (stage.movers for stage in pipe.stages.values() if stage.movers is not None and stage.movers._free)
    assert isinstance(movers, Movers)
    assert len(movers._free) == most_at_once(plan) < len(plan.moved(0))
    assert disk_threads() - before
    pipe.close()
    assert not disk_threads() - before
    assert not list(tmp_path.iterdir())
    pipe.close()
    with pytest.raises(SavedError, match="a policy that was closed cannot be entered"), movers._free[0]:
        pass


def test_a_step_that_failed_leaves_no_threads(tmp_path: Path) -> None:
    def wrong(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("on purpose")

    before, x = disk_threads(), batch()
    pipe = Pipeline(
        blocks(), schedule=away("1f1b", 1.0), loss_fn=wrong, ranks=2, transport=LocalTransport(), offload_to=tmp_path
    )
    with pytest.raises(PipelineError, match="on purpose"):
        pipe.step(x, target=x)
    pipe.close()
    assert not disk_threads() - before
    assert not list(tmp_path.rglob("*.bin"))


def predicted(plan: Schedule) -> list[int]:
    """What each rank holds in a step beyond parameters and gradients, as it is counted before."""
    model, x = blocks(), batch()[:2]
    layout = lay_out(model, x, wanted=2)
    (room,) = rooms(model, layout, [layout.starts(["2"])], 1, x, x, F.mse_loss)
    return [rank.activations + rank.working for rank in room.ranks(plan)]


def on_two(rank: int, folder: str, expected: list[int]) -> None:
    x, alone = batch(), blocks()
    F.mse_loss(alone(x), x).backward()
    reference = dict(alone.named_parameters())
    pipe = Pipeline(blocks(), schedule=away("1f1b", 1.0), loss_fn=F.mse_loss, offload_to=folder)
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(x, target=x)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)
    ran = [str(event.action) for event in result.timeline.events[0]]
    assert ran.index("0F0") < ran.index("0OFFLOAD0") < ran.index("0RELOAD0") < ran.index("0B0")
    with OperationCounter() as counter:
        pipe.step(x, target=x)
        before = counter.peak = counter.now
        pipe.step(x, target=x)
    assert 0.999 <= expected[rank] / (counter.peak - before) <= 1.03
    pipe.close()


def test_two_processes(tmp_path: Path) -> None:
    on_ranks(2, on_two, str(tmp_path), predicted(away("1f1b", 1.0)))


def test_what_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="OFFLOAD on the CPU needs a folder"):
        Pipeline(blocks(), schedule=away("1f1b", 1.0), loss_fn=F.mse_loss, ranks=2, transport=LocalTransport())
    with pytest.raises(PipelineError, match=r"offload_to is for a schedule with OFFLOAD; got 1f1b"):
        Pipeline(
            blocks(), schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport(),
            offload_to=tmp_path,
        )  # fmt: skip
