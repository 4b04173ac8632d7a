"""Sharded stages under "auto": what gathering costs is known before the first step, and bytes decide how many stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gloo import on_ranks
from sternway import schedule
from sternway.pipeline import LocalTransport, Pipeline, Profile
from sternway.pipeline.build import _measure
from sternway.pipeline.build._best_option import PlanOption
from sternway.pipeline.build._link import LinkSpeed, ShardLink
from sternway.pipeline.build._options import draft_plans
from sternway.pipeline.build._rank_bytes import Shards
from sternway.pipeline.build._request import BuildRequest
from sternway.schedule import Upkeep

DIM, MICROBATCHES = 32, 4


class FixedLink(ShardLink):
    """A link of which the speed is known."""

    def measure(self, nbytes: float, device: torch.device) -> LinkSpeed:
        return LinkSpeed(1e-6, 2e-6)


def option(memory: int | None, monkeypatch: pytest.MonkeyPatch, **others: Any) -> PlanOption:
    """What "auto" plans for two ranks with two stages each, whose stages are sharded over two processes."""

    backward = iter([1.0])

    def fixed(calls: Any, sample: Any, **options: Any) -> Profile:
        ones, size = (1.0,) * len(calls), (1000,) * len(calls)
        b = (next(backward, 9.0),) * len(calls)  # the second profile is that of blocks recomputed selectively
        return Profile(("",) * len(calls), ones, ones, ones, b, size, size, size)

    monkeypatch.setattr(_measure, "profile", fixed)
    torch.manual_seed(0)
    x = torch.zeros(2, 16, DIM)
    request = BuildRequest(
        gpt(DIM, 4), "auto", 2, 2, cuts=["1", "2", "3"], loss_fn=F.mse_loss, sample=x, sample_target=x,
        everyone=[0], memory=memory, shard=lambda stage: None, shards=None if memory is None else Shards(2),
        link=FixedLink(None),
    )  # fmt: skip
    draft = draft_plans(replace(request, **others), LocalTransport())
    assert draft is not None
    return min(draft.options, key=lambda each: each.cost())


def test_the_speed_of_the_link_is_the_price_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    found = option(None, monkeypatch)
    size = sum(p.nbytes for p in gpt(DIM, 1).parameters())
    assert found.costs.gather == pytest.approx([1e-6 * size] * 4)
    assert found.costs.reduce == pytest.approx([2e-6 * size] * 4)
    assert not found.schedule.gathered, "upkeep is placed when stages are sharded"
    assert found.cost()[0] == pytest.approx(schedule.sharded(found.schedule).simulate(found.costs).period)
    assert found.cost()[0] > found.schedule.simulate(found.costs).period


def test_fewer_stages_stay_gathered_where_bytes_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    ample = option(1 << 30, monkeypatch)
    assert ample.gathered == 2
    assert ample.room is not None
    peak = ample.room.peak(ample.schedule)
    tight = option(peak - 20_000, monkeypatch)  # a stage has 50 kB of parameters
    assert tight.room is not None
    assert tight.room.fits(tight.schedule)
    assert tight.gathered == 1
    assert tight.cost()[0] > ample.cost()[0]
    chosen = option(1 << 30, monkeypatch, shards=Shards(2, 1), gathered=1)
    assert chosen.gathered == 1, "as the user says"


def _runs(rank: int) -> None:
    """A step by a price that was measured: gradients of one process, and a reduction that has a length."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))

    def shard(stage: nn.Module) -> None:
        for block in stage.children():
            fully_shard(block, mesh=mesh["dp_shard"])

    def model() -> nn.Module:
        torch.manual_seed(0)
        return gpt(DIM, 4)

    torch.manual_seed(1)
    batch = torch.randn(4 * MICROBATCHES, 16, DIM)
    x, reference = batch.chunk(2)[mesh.get_local_rank("dp_shard")], model()
    F.mse_loss(reference(batch), batch).backward()
    expected: dict[str, Tensor | None] = {name: p.grad for name, p in reference.named_parameters()}
    pipe = Pipeline(
        model(), schedule="auto", n_microbatches=MICROBATCHES, loss_fn=F.mse_loss, mesh=mesh, sample=x[:2],
        sample_target=x[:2], shard=shard, cuts=["2"], tune=False,
    )  # fmt: skip
    prices = pipe.transport.crew_apart(range(4)).share((pipe.costs.gather, pipe.costs.reduce))
    assert all(price == prices[0] for price in prices), "one price for all"
    assert all(time > 0 for times in prices[0] for time in times)
    timeline = pipe.step(x, target=x).timeline
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-6)
    assert timeline is not None
    for events in timeline.events:
        lengths = {event.action.op: event.end - event.start for event in events if isinstance(event.action, Upkeep)}
        assert lengths["REDUCE_GRAD"] > 0
        assert lengths["UNSHARD"] >= 0
    seen = schedule.measured_costs(timeline, pipe.costs)
    assert all(time > 0 for time in seen.per_stage(timeline.schedule.placement).reduce)
    pipe.close()


def test_a_price_is_measured_and_steps_show_another() -> None:
    on_ranks(4, _runs)
