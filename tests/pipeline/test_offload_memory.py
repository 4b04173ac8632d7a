"""Plans within a number of bytes that take microbatches off the device: chosen, run, counted and refused."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from gloo import on_ranks
from held import held_while_plans_are_tried
from searches import searches_at_once
from sternway import pipeline
from sternway.errors import PipelineError, SavedError
from sternway.pipeline import DistTransport, LocalTransport, Pipeline
from sternway.pipeline.build import _measure
from sternway.pipeline.build._offload import agreed_rate, make_policies
from sternway.pipeline.build._partition import lay_out
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.build._room import rooms
from sternway.saved import Offload

DIM, COUNT = 32, 6
FAST, SLOW = "1000GB", 1000  # bytes in a second: so that a move is always, or never, faster than a forward


def model() -> nn.Module:
    torch.manual_seed(0)
    return gpt(DIM, 4)


def normed() -> nn.Module:
    """Blocks that cannot be recomputed: their running means would change twice."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(64), nn.Tanh()) for _ in range(4)))


def unlike() -> nn.Module:
    """Blocks of which none is repeated, so that none is recomputed."""
    blocks = model()
    for index, block in enumerate(blocks):
        block.__class__ = type(f"Block{index}", (type(block),), {})
    return blocks


def batch(rows: int = 2 * COUNT) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 64, DIM)


@pytest.fixture(autouse=True)
def _equal_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces take equally long, whatever else this machine does."""

    def profile(*arguments: Any, **more: Any) -> pipeline.Profile:
        found = pipeline.profile(*arguments, **more, repeats=1)
        one = (1e-3,) * len(found.F)
        return replace(found, F=one, I=one, W=one, B=one)

    monkeypatch.setattr(_measure, "profile", profile)


@functools.cache
def needed(name: str) -> int:
    """What the fullest rank of a named schedule needs, if nothing is recomputed or moved."""
    x = batch(2)
    found = pipeline.fit(model(), x, ranks=2, n_microbatches=COUNT, schedule=name, loss_fn=F.mse_loss, target=x)
    return next(way.peak for way in found.ways if not way.recompute)


def build(memory: int | str, schedule: str = "auto", make: Any = model, **more: Any) -> Pipeline:
    x = batch(2)
    return Pipeline(
        make(), schedule=schedule, n_microbatches=COUNT, loss_fn=F.mse_loss, sample=x, sample_target=x, memory=memory,
        **more,
    )  # fmt: skip


def assert_right(pipe: Pipeline, make: Any = model) -> None:
    alone, x = make(), batch()
    F.mse_loss(alone(x), x).backward()
    reference = dict(alone.named_parameters())
    pipe.step(x, target=x)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)
        parameter.grad.zero_()


@pytest.mark.parametrize("name", ["1f1b", "auto"])
@pytest.mark.parametrize(("rate", "moves"), [(FAST, True), (SLOW, False)])
def test_the_faster_of_two_ways_to_fit_is_taken(name: str, rate: Any, moves: bool, tmp_path: Path) -> None:
    limit = int(0.75 * needed("1f1b"))
    pipe = build(limit, name, ranks=2, transport=LocalTransport(), offload_to=tmp_path, offload_rate=rate)
    assert_right(pipe)
    assert ("offloaded: " in repr(pipe)) == pipe.schedule.name.endswith("-offloaded") == moves
    assert not (moves and pipe.schedule.recompute)
    assert moves or pipe.schedule.recompute or name == "auto"  # which may take another order, if that is quicker here
    assert pipe._plan.room.fits(pipe.schedule)
    pipe.close()
    assert not list(tmp_path.iterdir())


def test_nothing_moves_where_all_fits(tmp_path: Path) -> None:
    pipe = build("1GB", ranks=2, transport=LocalTransport(), offload_to=tmp_path, offload_rate=FAST)
    assert_right(pipe)
    assert "offloaded" not in repr(pipe)
    assert all(stage.movers is None for stage in pipe.stages.values())


def stay_within(rank: int, limit: int, folder: str) -> None:
    with searches_at_once():
        pipe = build(limit, "auto", unlike, cuts=["2"], offload_to=folder, offload_rate=FAST)
    assert pipe.schedule.moved(0)  # at first; which of the plans that fit is the fastest, the steps decide
    held = held_while_plans_are_tried(pipe, model(), batch())
    assert held <= 1.03 * limit, (held, limit, str(pipe.schedule))
    assert len({plan.actions for plan in pipe.transport.crew().share(pipe.schedule)}) == 1
    pipe.close()


def test_real_processes_stay_within_the_limit(tmp_path: Path) -> None:
    on_ranks(2, stay_within, int(0.75 * needed("1f1b")), str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recomputed_can_be_moved(tmp_path: Path) -> None:
    x = batch(2)
    need = pipeline.fit(normed(), x, ranks=2, n_microbatches=COUNT, schedule="gpipe", loss_fn=F.mse_loss, target=x)
    limit, here = int(0.75 * need.ways[0].peak), {"ranks": 2, "transport": LocalTransport()}
    with pytest.raises(PipelineError, match="must fit into memory"):
        build(limit, "gpipe", normed, **here)
    pipe = build(limit, "gpipe", normed, offload_to=tmp_path, offload_rate=SLOW, **here)
    assert "offloaded: " in repr(pipe)
    plain, rows = normed(), batch()
    once = Pipeline(plain, schedule="gpipe", n_microbatches=COUNT, loss_fn=F.mse_loss, **here)
    for each in (pipe, once):
        each.step(rows, target=rows)
    for (name, parameter), (other, same) in zip(pipe.named_parameters(), once.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(parameter.grad, same.grad)
    pipe.close()


def test_what_is_refused_says_what_it_would_take(tmp_path: Path) -> None:
    here = {"ranks": 2, "offload_to": tmp_path, "offload_rate": FAST}
    with pytest.raises(PipelineError, match=r"under 1f1b, recomputing blocks: parameters .*memory=\d+") as no:
        build(10_000, "1f1b", transport=LocalTransport(), **here)
    least = int(str(no.value).rsplit("memory=")[-1].split()[0].rstrip("."))
    assert_right(build(least, "1f1b", transport=LocalTransport(), **here))
    assert least < 0.6 * needed("1f1b")
    with pytest.raises(PipelineError, match="must fit into memory"):
        build(least - 1, "1f1b", transport=LocalTransport(), **here)


def test_bad_arguments(tmp_path: Path) -> None:
    here = {"ranks": 2, "transport": LocalTransport()}
    with pytest.raises(PipelineError, match=r"offload_rate is for plans within memory=.*got offload_rate=5, memory=No"):
        Pipeline(model(), schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, offload_rate=5, **here)
    with pytest.raises(PipelineError, match="must be more than nothing"):
        build("1GB", offload_rate=0, **here)
    with pytest.raises(PipelineError, match="offload_rate must be a size; got 'fast'"):
        build("1GB", offload_rate="fast", **here)
    with pytest.raises(SavedError, match="directory must be an existing directory"):
        build("1GB", offload_to=tmp_path / "none", **here)
    with pytest.raises(PipelineError, match="offload_to is for a schedule with OFFLOAD; got 1f1b"):
        Pipeline(model(), schedule="1f1b", n_microbatches=2, loss_fn=F.mse_loss, offload_to=tmp_path, **here)


def rates(rank: int, folder: str) -> None:
    class Given(Offload):
        def rate(self, device: torch.device) -> float:
            return (3.0, 2.0)[rank]

    transport = DistTransport()
    transport.place([torch.device("cpu")])
    make = make_policies(folder, torch.device("cpu"))
    assert make is not None
    request = BuildRequest(model(), "auto", 2, memory=1, offload=make)
    measured = agreed_rate(request, transport)
    assert measured is not None
    assert 0 < measured < math.inf
    assert len(set(transport.crew().share(measured))) == 1
    given = replace(request, offload=lambda: Given(make().offloader))
    assert agreed_rate(given, transport) == 2.0
    assert agreed_rate(replace(request, offload_rate=7.0), transport) == 7.0
    assert agreed_rate(replace(request, offload=None), transport) is None
    transport.close()


def test_the_slowest_link_counts(tmp_path: Path) -> None:
    on_ranks(2, rates, str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_a_rate_without_anywhere_to_go(schedule: str) -> None:
    x = batch(2)
    with pytest.raises(PipelineError, match=r"offload_rate is for stages that can be offloaded.*nowhere to go"):
        Pipeline(
            model(), schedule=schedule, n_microbatches=COUNT, loss_fn=F.mse_loss, ranks=2, sample=x, sample_target=x,
            memory="1GB", offload_rate=FAST, transport=LocalTransport(),
        )  # fmt: skip


class Table(nn.Module):
    """Multiplies by a table, which is a buffer or a plain attribute."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.linear, table = nn.Linear(DIM, DIM), torch.ones(64, DIM)
        if as_buffer:
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.table).tanh()


def test_tables_of_modules_do_not_leave_with_a_microbatch() -> None:
    weighed = []
    for as_buffer in (True, False):
        blocks = nn.Sequential(*(Table(as_buffer) for _ in range(4)))
        x = batch(2)
        (room,) = rooms(blocks, lay_out(blocks, x, wanted=2), [[0, 2]], 10**9, x, x, F.mse_loss, None, 1e9)
        weighed.append([(each.freed, each.moved) for each in room.weights])
        assert all(0 < each.freed <= each.actions["F"].left for each in room.weights)
    assert weighed[0] == weighed[1]
