"""Saved tensors in a split backward and in a pipeline: packed in F, still packed between I and W."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import MODELS, gpt, llama
from saved_steps import moving
from torch import Tensor, nn

from compare import assert_same_grads, assert_split_equals_backward, names, twin
from sternway import pipeline, saved, split
from sternway.saved import Policy


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_the_split_defers_under_a_policy_and_equals_backward(name: str, first_stage: bool) -> None:
    make, shape = MODELS[name]
    model, policy = make(), moving(window=0, prefetch=0)
    x = torch.randn(shape, requires_grad=not first_stage)

    def call(model: nn.Module, *inputs: Tensor) -> Tensor:
        with policy:
            return model(*inputs)  # type: ignore[no-any-return]

    plain = assert_split_equals_backward(make(), x, rtol=2e-4, atol=2e-5)
    pending = assert_split_equals_backward(model, x, call=call, rtol=2e-4, atol=2e-5)
    assert len(pending.deferred) == len(plain.deferred)
    assert policy.offloader._round.alive == {}


@pytest.mark.parametrize("kind", ["disk", "codec", "mutable"])
def test_other_policies_in_a_split(kind: str, tmp_path: Path) -> None:
    policy: Policy = {
        "disk": lambda: saved.offload(to="disk", directory=tmp_path, min_bytes=0, buffer=1),
        "codec": lambda: saved.compress("bf16", min_bytes=0),
        "mutable": saved.mutable,
    }[kind]()

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with policy:
            return model(x)  # type: ignore[no-any-return]

    tolerance = {"rtol": 0.05, "atol": 0.2} if kind == "codec" else {}
    pending = assert_split_equals_backward(
        gpt(16, 2), torch.randn(2, 5, 16, requires_grad=True), call=call, rounds=1, **tolerance
    )
    assert len(pending.deferred) == 16


def test_what_waits_stays_away_until_w() -> None:
    model, x = gpt(32, 2), torch.randn(2, 8, 32, requires_grad=True)
    reference, their_x = twin(model, x)
    grad = torch.randn(2, 8, 32)
    reference(their_x).backward(grad)
    held = {}
    for kind, policy in (("kept", None), ("away", moving(window=0, prefetch=0))):
        model.zero_grad()
        if policy is None:
            y = model(x)
        else:
            with policy:
                y = model(x)
        grads, pending = split.backward_input(y, grad, x)
        del y
        torch.testing.assert_close(grads, their_x.grad)
        held[kind] = pending.nbytes
        pending.run()
        assert_same_grads(model, reference)
    inputs = 2 * (1 + 1 + 1 + 4) * x.nbytes  # of qkv, out, up and down
    assert held["kept"] - held["away"] >= 0.9 * inputs


@pytest.mark.parametrize(
    "policy", [moving(window=0, prefetch=0), saved.compress("bf16", min_bytes=0)], ids=["moved", "encoded"]
)
def test_a_pending_can_be_packed(policy: Policy) -> None:
    model, x = llama(16, 2), torch.randn(2, 5, 16, requires_grad=True)
    reference, their_x = twin(model, x)
    reference(their_x).sum().backward()
    y = model(x).sum()
    _, pending = split.backward_input(y, None, x)
    del y
    before = pending.nbytes
    pending.pack(policy)
    pending.pack(policy)  # once is enough
    assert pending.nbytes < 0.6 * before
    pending.run()
    exact = isinstance(policy, saved.Offload)
    assert_same_grads(model, reference, **({} if exact else {"rtol": 0.05, "atol": 0.3}))


def test_a_pending_can_be_packed_for_hooked_parameters_and_groups() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    adapter = nn.Parameter(torch.randn(8, 8))
    seen: list[Tensor] = []
    layer.weight.register_hook(lambda grad: seen.append(grad))
    with moving(window=0) as _:
        y = nn.functional.linear(x, layer.weight + adapter, layer.bias).sum()
    _, pending = split.backward_input(y, None, x)
    pending.pack(moving(window=0))
    pending.run()
    expected = torch.ones(4, 8).t() @ x.detach()
    torch.testing.assert_close(adapter.grad, expected)
    torch.testing.assert_close(layer.weight.grad, expected)
    assert len(seen) == 1


def test_foreign_hooks_still_run_in_i() -> None:
    model, x = gpt(16, 1), torch.randn(2, 5, 16, requires_grad=True)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            return model(x)  # type: ignore[no-any-return]

    pending = assert_split_equals_backward(model, x, call=call, rounds=1)
    assert "0.up.weight" not in names(model, pending.deferred)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_pipeline_under_a_policy(schedule: str) -> None:
    torch.manual_seed(0)
    ranks, stages = 2, 4 if schedule == "zb-v" else 2
    modules = [gpt(16, 1) for _ in range(stages)]
    whole = nn.Sequential(*modules)
    reference, _ = twin(whole)[0], None
    x, target = torch.randn(8, 5, 16), torch.randn(8, 5, 16)
    loss = nn.functional.mse_loss
    policies: dict[int, saved.Offload] = {}

    def for_stage(index: int) -> saved.Offload:
        policies[index] = moving(budget=0.3, prefetch=4000, window=2000)
        return policies[index]

    pipe = pipeline.Pipeline(
        dict(enumerate(modules)),
        schedule=schedule,
        n_microbatches=4,
        loss_fn=loss,
        ranks=ranks,
        transport=pipeline.LocalTransport(),
        saved=for_stage,
    )
    for _ in range(3):
        whole.zero_grad()
        reference.zero_grad()
        theirs = loss(reference(x), target)
        theirs.backward()
        ours = pipe.step(x, target=target)
        torch.testing.assert_close(ours.loss, theirs.detach())
        assert_same_grads(whole, reference)
    assert sorted(policies) == list(range(stages))
    assert all(policy.offloader.rounds >= 3 and policy.offloader._round.alive == {} for policy in policies.values())


def test_one_policy_for_all_stages() -> None:
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    policy = moving()
    pipe = pipeline.Pipeline(
        dict(enumerate(modules)),
        schedule="gpipe",
        n_microbatches=2,
        loss_fn=nn.functional.mse_loss,
        ranks=2,
        transport=pipeline.LocalTransport(),
        saved=policy,
    )
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert policy.offloader.rounds >= 1
    assert policy.offloader._round.alive == {}
