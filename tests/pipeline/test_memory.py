"""Plans within a number of bytes: what real processes hold, and what is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from held import held_while_plans_are_tried
from searches import searches_at_once
from sternway import pipeline
from sternway.errors import PipelineError
from sternway.pipeline import LocalTransport, Pipeline

DIM, COUNT = 32, 6


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    blocks = gpt(DIM, 4)
    return nn.Sequential(*(nn.Sequential(block, nn.Dropout(dropout)) for block in blocks)) if dropout else blocks


def batch(rows: int = 2 * COUNT) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 64, DIM)


@functools.cache
def needed(name: str) -> int:
    """What the fullest rank of a named schedule needs, without recomputation."""
    x = batch(2)
    found = pipeline.fit(model(), x, ranks=2, n_microbatches=COUNT, schedule=name, loss_fn=F.mse_loss, target=x)
    return next(way.peak for way in found.ways if not way.recompute)


def build(memory: int | str, schedule: str = "auto", **more: Any) -> Pipeline:
    x = batch(2)
    return Pipeline(
        model(), schedule=schedule, n_microbatches=COUNT, loss_fn=F.mse_loss, sample=x, sample_target=x, memory=memory,
        **more,
    )  # fmt: skip


def stay_within(rank: int, limit: int) -> None:
    with searches_at_once():
        pipe = build(limit)
    held = held_while_plans_are_tried(pipe, model(), batch())
    assert held <= 1.03 * limit, (held, limit, str(pipe.schedule))
    assert "of" in repr(pipe).split("memory")[1]
    assert len({plan.actions for plan in pipe.transport.crew().share(pipe.schedule)}) == 1
    pipe.close()


def test_real_processes_stay_within_the_limit() -> None:
    on_ranks(2, stay_within, int(0.6 * needed("1f1b")))  # test_recompute.py: with more, and with less


def test_less_memory_makes_blocks_compute_again_and_gradients_stay_right() -> None:
    x = batch()
    plain, small = (  # cut in the middle: elsewhere, as measured under load, not even the first would fit
        build(memory, ranks=2, transport=LocalTransport(), cuts=["2"])
        for memory in (needed("zb-h2"), int(0.6 * needed("1f1b")))
    )
    assert "computed again" not in repr(plain)
    assert "computed again" in repr(small)
    alone = model()
    F.mse_loss(alone(x), x).backward()
    for pipe in (plain, small):
        pipe.step(x, target=x)
        reference = dict(alone.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)


def test_dropout_is_the_same_when_blocks_are_computed_again() -> None:
    x, sample = batch(), batch(2)
    grads = []
    for memory in ("1GB", int(0.6 * needed("1f1b"))):
        torch.manual_seed(5)
        pipe = Pipeline(
            model(0.3), schedule="auto", n_microbatches=COUNT, loss_fn=F.mse_loss, sample=sample, sample_target=sample,
            memory=memory, cuts=["2"], ranks=2, transport=LocalTransport(),
        )  # fmt: skip
        torch.manual_seed(6)
        pipe.step(x, target=x)
        grads.append({name: parameter.grad for name, parameter in pipe.named_parameters()})
        assert ("computed again" in repr(pipe)) == (memory != "1GB")
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6)


def test_what_cannot_fit_is_refused() -> None:
    """With the nearest that fits: the named schedule that does, in which as few blocks are recomputed as that takes."""
    refused = r"under gpipe, recomputing blocks: parameters .*, activations .*"
    with pytest.raises(PipelineError, match=rf"{refused} Fix: use .*, or pass at least memory=\d+") as no:
        build(int(0.1 * needed("gpipe")), "gpipe", ranks=2, transport=LocalTransport())
    least = int(str(no.value).rsplit("=", 1)[1])
    with pytest.raises(
        PipelineError, match=rf'{refused} Fix: pass schedule="1f1b", which needs .*, recomputing .*blocks'
    ):
        build(least - 1, "gpipe", ranks=2, transport=LocalTransport())
    build(least - 1, "1f1b", ranks=2, transport=LocalTransport())
    with pytest.raises(PipelineError, match="memory needs a whole model"):
        Pipeline({0: nn.Linear(2, 2)}, ranks=1, n_microbatches=1, memory="1GB", transport=LocalTransport())
    with pytest.raises(PipelineError, match="memory needs a sample"):
        Pipeline(model(), ranks=2, n_microbatches=4, memory="1GB", transport=LocalTransport())
    with pytest.raises(PipelineError, match="memory must be a size; got 'lots'"):
        build("lots", ranks=2, transport=LocalTransport())


def test_a_model_that_is_not_taken_stays_as_it_was() -> None:
    blocks = model()
    before = copy.deepcopy(blocks)
    with pytest.raises(PipelineError, match=r"must fit into memory=2.0 KiB on every rank; got .* on rank \d under"):
        Pipeline(
            blocks, ranks=2, n_microbatches=4, memory=2000, sample=batch(2), loss_fn=F.mse_loss,
            sample_target=batch(2), transport=LocalTransport(),
        )  # fmt: skip
    x = batch(2)
    F.mse_loss(blocks(x), x).backward()
    F.mse_loss(before(x), x).backward()
    assert_same_grads(blocks, before)
    assert not any("forward" in vars(module) for module in blocks.modules())


def test_blocks_with_batch_norms_are_not_computed_again() -> None:
    """Their running means would change twice."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(64, 8)
    found = pipeline.fit(blocks, x, ranks=2, n_microbatches=4, schedule="1f1b")
    assert [way.recompute for way in found.ways] == [False]
    with pytest.raises(PipelineError, match="must fit into memory"):
        Pipeline(
            blocks, ranks=2, n_microbatches=4, memory=int(0.9 * found.ways[0].peak), sample=x, schedule="1f1b",
            loss_fn=F.mse_loss, sample_target=x, transport=LocalTransport(),
        )  # fmt: skip
