"""Messages between ranks: their tags and order, receives that are posted ahead, many tensors in one message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from gloo import on_ranks
from sternway import schedule
from sternway.pipeline import Pipeline, WithSkips
from sternway.pipeline.transport._messenger import Messenger
from sternway.pipeline.transport._order import answers, edge_of, edges_of, expected
from sternway.pipeline.transport._payload import Payload, pack
from sternway.pipeline.transport._routes import MessageKey, Routes

SKIPS = {"early": (0, 3), "late": (1, 2)}


class FakeArriving:
    tensors: ClassVar[list[Tensor]] = [torch.zeros(2)]

    def wait(self) -> None:
        pass


class FakeCarrier:
    """What carries tensors, without processes: notes which receives are posted."""

    ahead = 2

    def __init__(self) -> None:
        self.posted: list[MessageKey] = []

    def connect(self, schedule: Any, routes: Routes) -> None:
        pass

    def receive(self, key: MessageKey, spec: Any, source: int) -> FakeArriving:
        self.posted.append(key)
        return FakeArriving()

    def send(self, key: MessageKey, tensors: list[Tensor], target: int) -> None:
        pass

    def answered(self, key: MessageKey) -> None:
        pass


def messenger_of(plan: schedule.Schedule, routes: Routes, rank: int, carrier: FakeCarrier) -> tuple[Messenger, Payload]:
    """A rank's messenger in a step before which all descriptions are known, and a payload that fits them."""
    messenger = Messenger(SimpleNamespace(rank=rank), carrier, carrier, dynamic=False)
    messenger.connect(plan, routes)
    payload = pack(torch.zeros(2, requires_grad=True))
    messenger._told = 1, True
    for key in all_keys(plan, routes):
        if not key.is_gradient:
            messenger._learn(key, payload[0])
    messenger.begin(1, training=True)
    return messenger, payload


def all_keys(plan: schedule.Schedule, routes: Routes) -> list[MessageKey]:
    return [key for rank in plan.actions for step in rank for action in step.actions for key in routes.sent(action)]


def test_what_arrives_says_which_messages_were_there() -> None:
    """A gradient has no answer of its own: it is kept until something comes that was sent after it had arrived."""
    plan = schedule.make("1f1b", ranks=2, microbatches=4)  # rank 0: F0 F1 B0 F2 B1 F3 B2 B3
    routes = Routes(2, {})
    heard = answers(plan, routes, True, rank=1)
    assert {str(key.microbatch): [each.microbatch for each in keys] for key, keys in heard.items()} == {
        "0": [], "1": [], "2": [0], "3": [1],
    }  # fmt: skip
    assert all(each.is_gradient for keys in heard.values() for each in keys)
    assert all(keys == [key.back] for key, keys in answers(plan, routes, True, rank=0).items())
    assert not any(answers(schedule.make("gpipe", ranks=2, microbatches=4), routes, True, rank=1).values())
    assert not any(answers(plan, routes, False, rank=1).values()), "without a backward there is nothing to hear of"


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_every_message_of_a_step_has_a_tag_of_its_own(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=8)
    routes = Routes(plan.num_stages, SKIPS)
    for is_gradient in (False, True):
        tags = [routes.tag(key) for key in all_keys(plan, routes) if key.is_gradient == is_gradient]
        assert len(set(tags)) == len(tags)
        assert max(tags) < 2**31  # what torch.distributed takes


def test_so_many_receives_are_posted_ahead_on_each_edge() -> None:
    """Rank 1 of an interleaved schedule gets activations of stages 0 and 2, both from rank 0: one queue."""
    plan = schedule.make("interleaved-1f1b", ranks=2, microbatches=4)
    routes, carrier = Routes(plan.num_stages, {}), FakeCarrier()
    messenger, _ = messenger_of(plan, routes, 1, carrier)
    activations = [key for key in all_keys(plan, routes) if not key.is_gradient and plan.rank_of(key.target) == 1]
    from_zero = [key for key in activations if plan.rank_of(key.source) == 0]
    assert {key.source for key in from_zero} == {0, 2}
    assert [key for key in carrier.posted if not key.is_gradient] == from_zero[: carrier.ahead]
    for done, key in enumerate(from_zero[: -carrier.ahead], start=1):
        messenger.receive(key)
        assert len([key for key in carrier.posted if not key.is_gradient]) == carrier.ahead + done


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", schedule.names())
def test_messages_are_expected_in_the_order_in_which_they_are_sent(name: str, training: bool) -> None:
    plan = schedule.make(name, ranks=4, microbatches=8)
    routes = Routes(plan.num_stages, {"skip": (0, plan.num_stages - 1)})
    for rank in range(4):
        found = expected(plan, routes, training, rank)
        for edge, keys in found.items():
            sent = [
                key
                for step in plan.actions[edge.source]
                for action in step.actions
                for key in routes.sent(action)
                if edge_of(key, plan.stage_ranks()) == edge
            ]
            assert keys == sent
            assert edge.target == rank != edge.source
        needed = {
            key
            for step in plan.actions[rank]
            for action in step.actions
            if training or action.op == "F"
            for key in routes.received(action)
            if plan.rank_of(key.source) != rank
        }
        assert {key for keys in found.values() for key in keys} == needed


def test_edges_are_opened_in_an_order_in_which_no_rank_waits_for_ever() -> None:
    for name in schedule.names():
        plan = schedule.make(name, ranks=4, microbatches=8)
        routes = Routes(plan.num_stages, {})
        edges = edges_of(plan, routes)
        used = {edge_of(key, plan.stage_ranks()) for key in all_keys(plan, routes)}
        assert set(edges) == {edge for edge in used if edge.source != edge.target}
        left = {rank: [e for e in edges if rank in (e.source, e.target)] for rank in range(4)}
        while any(left.values()):
            ready = [e for e in edges if left[e.source][:1] == [e] == left[e.target][:1]]
            assert ready, f"{name}: no edge can be opened"
            for edge in ready:
                left[edge.source].pop(0)
                left[edge.target].pop(0)


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
