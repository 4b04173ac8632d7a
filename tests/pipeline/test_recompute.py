"""Schedules that say which stages are recomputed: run as planned, within the bytes, with the right gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway import schedule
from sternway._torch.memory import OperationCounter
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline import LocalTransport, Pipeline, WithSkips
from sternway.pipeline.build._partition import lay_out
from sternway.pipeline.build._room import Room, cost_of, rooms
from sternway.schedule import Costs, Schedule

DIM, BLOCKS, RANKS, COUNT = 32, 16, 4, 8
TIMES = Costs(F=1.0, I=1.2, W=0.8, B=1.8, comm=0.05)  # given, so that the plans do not depend on this machine


def blocks(count: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    return gpt(DIM, count)


def batch(rows: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 32, DIM)


def recomputed(name: str, *stages: int | tuple[int, float], ranks: int = 2, microbatches: int = 4) -> Schedule:
    return replace(schedule.make(name, ranks=ranks, microbatches=microbatches), recompute=stages)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_those_of_one_process(name: str, whole: bool) -> None:
    plan = recomputed(name, 0, 1)
    model, alone, x = blocks(4), blocks(4), batch(8)
    parts = dict(enumerate(model)) if plan.num_stages == 4 else {0: model[:2], 1: model[2:]}
    pipe = Pipeline(model if whole else parts, schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport())
    pipe.step(x, target=x)
    F.mse_loss(alone(x), x).backward()
    assert_same_grads(model, alone)
    checkpointed = [index for index, block in enumerate(model) if "forward" in vars(block)]
    assert checkpointed == ([] if not whole else [0, 1] if plan.num_stages == 4 else [0, 1, 2, 3])
    result = pipe.evaluate(x, target=x)
    torch.testing.assert_close(result.loss, F.mse_loss(alone(x), x))


def test_some_blocks_of_a_stage() -> None:
    """The first ones, whose backward comes when what the others kept is freed."""
    model, alone, x = blocks(8), blocks(8), batch(8)
    plan = recomputed("zb-h1", (0, 0.25), (1, 0.75))
    pipe = Pipeline(model, schedule=plan, loss_fn=F.mse_loss, ranks=2, transport=LocalTransport(), cuts=["4"])
    pipe.step(x, target=x)
    F.mse_loss(alone(x), x).backward()
    assert_same_grads(model, alone)
    assert [index for index, block in enumerate(model) if "forward" in vars(block)] == [0, 4, 5, 6]


class Noisy(nn.Module):
    """Dropout, and a forward that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.calls = nn.Linear(8, 8), nn.Dropout(0.5), SimpleNamespace(count=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.count += 1  # an attribute that is set, or a list, is as it was when the forward runs again
        return self.drop(self.linear(x).tanh())


def test_a_stage_runs_its_forward_again_with_the_same_random_numbers() -> None:
    x, grads, calls = torch.randn(8, 8), [], []
    for stages in ((), (1,)):
        torch.manual_seed(3)
        modules = {0: Noisy(), 1: Noisy()}
        pipe = Pipeline(
            modules, schedule=recomputed("zb-h1", *stages), loss_fn=F.mse_loss, ranks=2, transport=LocalTransport()
        )
        torch.manual_seed(4)
        pipe.step(x, target=x)
        grads.append([p.grad for p in pipe.parameters()])
        calls.append([module.calls.count for module in modules.values()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [[4, 4], [4, 8]]


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> WithSkips:
        return WithSkips(self.linear(x).tanh(), {"early": x * self.linear.bias})


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return self.linear(x) + early


def test_skips_cross_a_stage_that_is_recomputed() -> None:
    x, found = torch.randn(8, 4), []
    for stages in ((), (0, 2)):
        torch.manual_seed(0)
        modules = {0: Skipping(), 1: nn.Linear(4, 4), 2: Joining()}
        pipe = Pipeline(
            modules, schedule=recomputed("1f1b", *stages, ranks=3), loss_fn=F.mse_loss, ranks=3,
            skips={"early": (0, 2)}, transport=LocalTransport(),
        )  # fmt: skip
        pipe.step(x, target=x)
        found.append([p.grad for p in pipe.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_what_cannot_run_twice_is_refused() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(PipelineError, match=r"stage 1 cannot be recomputed: .*; got BatchNorm1d"):
        Pipeline(
            {0: nn.Linear(4, 4), 1: norm}, schedule=recomputed("1f1b", 1), loss_fn=F.mse_loss, ranks=2,
            transport=LocalTransport(),
        )  # fmt: skip
    with pytest.raises(PipelineError, match=r"as a whole, not in part; got 0.5 of stage 1"):
        Pipeline(
            {0: nn.Linear(4, 4), 1: nn.Linear(4, 4)}, schedule=recomputed("1f1b", (1, 0.5)), loss_fn=F.mse_loss,
            ranks=2, transport=LocalTransport(),
        )  # fmt: skip
    with pytest.raises(PipelineError, match=r"must have a block that the model repeats.*got stage 1 of"):
        Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Bilinear(4, 4, 4)), schedule=recomputed("1f1b", 1), loss_fn=F.mse_loss,
            ranks=2, transport=LocalTransport(),
        )  # fmt: skip


class Twice(nn.Module):
    """Two stages of the same blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = gpt(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


def test_blocks_that_two_recomputed_stages_share() -> None:
    model, alone, x = Twice(), Twice(), batch(8)
    pipe = Pipeline(model, schedule=recomputed("1f1b", 0, 1), loss_fn=F.mse_loss, ranks=2, transport=LocalTransport(),
        sample=x[:2],
    )  # fmt: skip
    pipe.step(x, target=x)
    F.mse_loss(alone(x), x).backward()
    assert_same_grads(model, alone)
    assert all("forward" in vars(block) for block in model.blocks)


Todo = list[tuple[float, int, Schedule, list[str], list[int]]]


def plans() -> Todo:
    """For 100%, 60% and 40% of the bytes of 1F1B: the bytes, the best plan, the cuts of its model, and what ranks hold.

    It is compared with every named schedule that fits, as it is and with all stages recomputed.
    """
    x, model = batch(2), blocks()
    layout = lay_out(model, x, wanted=2 * RANKS)
    ways = [layout.balanced([1.0] * BLOCKS, count) for count in (RANKS, 2 * RANKS)]
    weighed = rooms(model, layout, ways, 0, x, x, F.mse_loss)
    needed = weighed[0].peak(schedule.make("1f1b", ranks=RANKS, microbatches=COUNT))
    found = []
    for share in (1.0, 0.6, 0.4):
        limit, best = int(share * needed), []
        for way, room in zip(ways, (replace(each, limit=limit) for each in weighed), strict=True):
            costs = room.costs(TIMES, RANKS)
            plan = searched(room, costs, len(way) // RANKS)
            if room.fits(plan):
                told = [each.activations + each.working for each in room.ranks(plan)]
                best.append((cost_of(plan, costs), plan, [layout.names[start] for start in way[1:]], told))
        cost, plan, cuts, told = min(best, key=lambda each: each[0])
        for way, room in zip(ways, (replace(each, limit=limit) for each in weighed), strict=True):
            for name in schedule.names():
                for stages in ((), tuple(range(len(way)))):
                    named = schedule.make(name, ranks=RANKS, microbatches=COUNT)
                    if named.num_stages == len(way) and room.fits(named := replace(named, recompute=stages)):
                        assert cost <= cost_of(named, room.costs(TIMES, RANKS)), (share, name, stages)
        found.append((share, limit, plan, cuts, told))
    return found


def searched(room: Room, costs: Costs, per_rank: int) -> Schedule:
    def find(limit: object, recompute: object) -> Schedule:
        return schedule.search(
            costs, ranks=RANKS, microbatches=COUNT, memory_limit=limit, stages_per_rank=per_rank, recompute=recompute
        )

    return room.best(find, 2.0 * RANKS, costs)[0]


def run_within(rank: int, todo: Todo) -> None:
    x = batch(2 * COUNT)
    alone = blocks()
    F.mse_loss(alone(x), x).backward()
    reference = dict(alone.named_parameters())
    for share, limit, plan, cuts, told in todo:
        pipe = Pipeline(blocks(), schedule=plan, cuts=cuts, loss_fn=F.mse_loss)
        pipe.step(x, target=x)  # now there are gradients
        with OperationCounter() as counter:
            pipe.step(x, target=x)  # now it knows what was there before
            for parameter in pipe.parameters():
                parameter.grad.zero_()
            before = counter.peak = counter.now
            pipe.step(x, target=x)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-4, atol=1e-6)
        own = sum(parameter.nbytes for parameter in pipe.parameters())
        held = 4 * own + counter.peak - before  # gradients, and AdamW's two
        assert held <= limit, (share, rank, held, limit, plan.name, plan.recompute)
        assert counter.peak - before == pytest.approx(told[rank], rel=0.03), (share, rank, plan.name, plan.recompute)
        pipe.close()


def test_sixteen_blocks_under_less_and_less_memory() -> None:
    found = plans()
    sizes = [sum(share.whole for share in plan.shares.values()) / plan.num_stages for _, _, plan, _, _ in found]
    assert sizes[0] == 0  # of 1F1B all would fit; a faster order does if some blocks are recomputed selectively
    assert 0 < sizes[-1] < 1
    assert any(
        share.whole < 1 for _, _, plan, _, _ in found for share in plan.shares.values()
    )  # some blocks of a stage
    on_ranks(RANKS, run_within, found)


def test_nothing_smaller_is_searched_than_fits() -> None:
    with pytest.raises(ScheduleError, match="large enough for one microbatch"):
        schedule.search(Costs(memory_input=0.5), ranks=2, microbatches=2, memory_limit=0.7, recompute="auto")


@pytest.mark.parametrize("name", ["1f1b", "auto"])
def test_a_stage_without_blocks_is_left_as_it_is(name: str) -> None:
    """A stem has nothing that can be recomputed, and a plan within the bytes does not ask it to."""

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(DIM, DIM), *gpt(DIM, 2))

    x = batch(2)
    layout = lay_out(made(), x, wanted=3)
    (room,) = rooms(made(), layout, [[0, 1, 2]], 10**9, x, x, F.mse_loss)
    one = schedule.make("1f1b", ranks=3, microbatches=6)
    least, most = (room.peak(replace(one, recompute=stages)) for stages in ((1, 2), ()))
    assert least < most
    options = {"schedule": name, "n_microbatches": 6, "ranks": 3, "cuts": ["1", "2"], "transport": LocalTransport()}
    pipe = Pipeline(made(), loss_fn=F.mse_loss, sample=x, sample_target=x, memory=(least + most) // 2, **options)
    assert 0 not in pipe.schedule.recompute
    assert pipe.schedule.recompute or name == "auto"  # which may take an order that holds less, if that is quicker here
    alone, rows = made(), batch(12)
    pipe.step(rows, target=rows)
    F.mse_loss(alone(rows), rows).backward()
    expected = dict(alone.named_parameters())
    for parameter_name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[parameter_name].grad, rtol=1e-4, atol=1e-6)
