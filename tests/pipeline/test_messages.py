"""Messages between ranks: their tags, the receives that are posted ahead, and many tensors in one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway import schedule
from sternway.pipeline import Pipeline, WithSkips
from sternway.pipeline.transport import _messenger
from sternway.pipeline.transport._messenger import AHEAD, Messenger
from sternway.pipeline.transport._payload import pack
from sternway.pipeline.transport._routes import MessageKey, Routes

SKIPS = {"early": (0, 3), "late": (1, 2)}


class FakeWork:
    def wait(self) -> None:
        pass


class FakeGroups:
    """The process groups of one rank, without processes: notes what is posted."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.members, self.device = rank, list(range(ranks)), torch.device("cpu")
        self.activations, self.gradients = "activations", "gradients"
        self.posted: list[tuple[int, str, int]] = []

    def attempt(self, call: Any, *arguments: Any, **options: Any) -> Any:
        if call is _messenger.dist.irecv:
            self.posted.append((arguments[1], options["group"], options["tag"]))
            return FakeWork()
        return FakeWork() if call is _messenger.dist.isend else call(*arguments, **options)


def all_keys(plan: schedule.Schedule, routes: Routes) -> list[MessageKey]:
    return [key for rank in plan.actions for step in rank for action in step.actions for key in routes.sent(action)]


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_every_message_of_a_step_has_a_tag_of_its_own(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=8)
    routes = Routes(plan.num_stages, SKIPS)
    messenger = Messenger(FakeGroups(0, 2), dynamic=False)
    messenger.begin(plan, routes, training=True)
    tags = [(messenger._group(key), messenger.tag(key)) for key in all_keys(plan, routes)]
    assert len(set(tags)) == len(tags)
    assert max(tag for _, tag in tags) < 2**31  # what torch.distributed takes


def test_so_many_receives_are_posted_ahead_from_each_rank_in_each_direction() -> None:
    """Rank 1 of an interleaved schedule gets activations of stages 0 and 2, both from rank 0: one queue."""
    plan = schedule.make("interleaved-1f1b", ranks=2, microbatches=4)
    routes = Routes(plan.num_stages, {})
    groups = FakeGroups(1, 2)
    messenger = Messenger(groups, dynamic=False)
    spec, _ = pack(torch.zeros(2, requires_grad=True))
    for _ in range(2):
        messenger.begin_batch("the same")
    messenger._specs = {key: spec for key in all_keys(plan, routes) if not key.is_gradient}
    messenger.begin(plan, routes, training=True)
    activations = [key for key in all_keys(plan, routes) if not key.is_gradient and plan.rank_of(key.target) == 1]
    from_zero = [key for key in activations if plan.rank_of(key.source) == 0]
    assert {key.source for key in from_zero} == {0, 2}
    assert [tag for _, group, tag in groups.posted if group == "activations"] == [
        messenger.tag(key) for key in from_zero[:AHEAD]
    ]
    for done, key in enumerate(from_zero[:-AHEAD], start=1):
        messenger.receive(key)
        assert len([1 for _, group, _ in groups.posted if group == "activations"]) == AHEAD + done


class Many(nn.Module):
    """Sends on many tensors at once, and one more that passes two stages by."""

    def __init__(self, count: int, skips: bool) -> None:
        super().__init__()
        self.scale, self.skips = nn.Parameter(torch.randn(count)), skips

    def forward(self, *tensors: Tensor, early: Tensor | None = None) -> Any:
        if len(tensors) == 1:
            tensors = tuple(tensors[0] + i for i in range(len(self.scale)))
        made = tuple(tensor * scale for tensor, scale in zip(tensors, self.scale, strict=True))
        if early is not None:
            made = (made[0] + early, *made[1:])
        return WithSkips(made, {"early": made[-1] * 2}) if self.skips else made


def _many(rank: int, count: int) -> None:
    torch.manual_seed(0)
    plan = schedule.make("interleaved-1f1b", ranks=2, microbatches=4)
    assert plan.num_stages == 4
    stages, reference = (nn.ModuleList([Many(count, skips=index == 0) for index in range(4)]) for _ in range(2))
    reference.load_state_dict(stages.state_dict())

    def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return F.mse_loss(torch.stack(output).sum(0), target)

    held = {index: stages[index] for index in plan.placement[rank]}
    pipe = Pipeline(held, schedule=plan, loss_fn=loss, skips={"early": (0, 3)})
    for _ in range(3):
        x, target = torch.randn(8, 3), torch.randn(8, 3)
        pipe.step(x, target=target)
        first = reference[0](x)
        middle = reference[2](*reference[1](*first.output))
        loss(reference[3](*middle, early=first.skips["early"]), target).backward()
        for index, module in held.items():
            assert_same_grads(module, reference[index], rtol=1e-3, atol=1e-4)


def test_more_than_62_tensors_in_one_message() -> None:
    on_ranks(2, _many, 200)
