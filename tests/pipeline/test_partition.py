"""Cutting models, weighing their parts, measuring them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads
from sternway import pipeline, schedule
from sternway.demo import GPT
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline import LocalTransport, Pipeline
from sternway.pipeline.build import _measure
from sternway.pipeline.build._partition import balance, split_model


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=11, dim=8, heads=2, layers=4, length=6)


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("cuts", [["blocks.2"], ["positions", "blocks.0", "blocks.3", "head"], []])
def test_stages_together_are_the_model(cuts: list[str]) -> None:
    model, tokens = _gpt(), torch.randint(0, 11, (3, 6))
    stages = split_model(model, cuts)
    assert len(stages) == len(cuts) + 1
    values = (tokens,)
    for stage in stages[:-1]:
        values = stage(*values)
    torch.testing.assert_close(stages[-1](*values), model(tokens))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_value_used_much_later_is_handed_on() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = self.a(x)
            return self.c(self.b(h).relu() * mask) + h * self.scale

    model, x, mask = Model(), torch.randn(3, 4), torch.randn(3, 4)
    values = (x, mask)
    stages = split_model(model, ["b", "c"])
    for stage in stages[:-1]:
        values = stage(*values)
    torch.testing.assert_close(stages[-1](*values), model(x, mask))


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["blocks.9"], r"got 'blocks\.9'. Fix: choose from tokens, positions, blocks\.0"),
        (["blocks.3", "blocks.1"], r"in the order of the calls.* Fix: pass \['blocks\.1', 'blocks\.3'\]"),
        (["head", "head"], "each once"),
    ],
)
def test_bad_cuts(cuts: list[str], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        split_model(_gpt(), cuts)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_balance_is_the_best_there_is(costs: list[int], parts: int) -> None:
    from itertools import combinations, pairwise

    if parts > len(costs):
        with pytest.raises(PipelineError, match="cannot have more stages than that"):
            balance(costs, parts)
        return
    starts = balance(costs, parts)
    assert len(starts) == parts

    def worst(starts: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)]))

    assert worst(starts) == min(worst([0, *rest]) for rest in combinations(range(1, len(costs)), parts - 1))


def test_partition_weighs_tables_as_free_and_heads_as_work() -> None:
    model = GPT(vocabulary=5000, dim=8, heads=2, layers=4, length=6)
    first, second = pipeline.partition(model, ranks=2)
    assert any(name == "head.weight" for name, _ in second.named_parameters())
    assert any(name.startswith("blocks.3") for name, _ in first.named_parameters())  # the head outweighs the blocks


def test_profile_measures_each_module() -> None:
    model, tokens = _gpt(), torch.randint(0, 11, (3, 6))
    found = pipeline.profile(model, tokens, loss_fn=_loss, target=tokens, repeats=2)
    assert found.names[:3] == ("tokens", "positions", "blocks.0")
    assert len(found.names) == 8
    block = found.names.index("blocks.1")
    assert found.F[block] > 0
    assert found.I[block] > 0
    assert found.W[block] > 0
    assert found.B[block] > 0
    assert found.costs.B in (found.B, None)
    assert 0 < found.bytes_after_I[block] <= found.bytes_after_F[block] * 1.2
    assert found.sent_bytes[block] == 3 * 6 * 8 * 4
    assert all(p.grad is None for p in model.parameters())
    grouped = found.grouped([0, 3, 6])
    assert sum(grouped.F) == pytest.approx(sum(found.F))
    assert len(grouped.costs.W) == 3
    cut = pipeline.partition(model, ranks=2, costs=found)
    assert len(cut) == 2


def test_profile_leaves_gradients_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.grad for parameter in model.parameters()]
    pipeline.profile(model, torch.randn(2, 4), repeats=1)
    with pytest.raises(PipelineError, match=r"the sample .* must go through the model"):
        pipeline.profile(model, torch.randn(2, 3), repeats=1)
    for parameter, grad in zip(model.parameters(), before, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, torch.ones_like(grad))


def test_a_whole_backward_counts_if_it_gains_more_than_noise() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    found = pipeline.profile(model, x, repeats=1)
    apart = tuple(i + w for i, w in zip(found.I, found.W, strict=True))
    assert replace(found, B=apart).costs.B is None
    half = tuple(time / 2 for time in apart)
    costs = replace(found, B=half).costs
    assert half == costs.B


@pytest.mark.parametrize("whole", [2.0, 1.0], ids=["B costs as much as I and W", "B costs half"])
def test_a_whole_model_balanced_and_searched(whole: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(model: nn.Module, sample: Tensor, **options: object) -> pipeline.Profile:
        found = pipeline.profile(model, sample, repeats=1, **options)
        one = (1.0,) * len(found.F)
        return replace(found, F=one, I=one, W=one, B=tuple(whole * time for time in one))

    monkeypatch.setattr(_measure, "profile", fixed)  # no times of this machine: they would choose the schedule
    model, tokens = _gpt(), torch.randint(0, 11, (8, 6))
    reference = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        cuts="balanced",
        schedule="auto",
        n_microbatches=4,
        ranks=2,
        loss_fn=_loss,
        sample=tokens[:2],
        sample_target=tokens[:2],
        transport=LocalTransport(),
    )
    ops = {action.op for rank in pipe.schedule.actions for step in rank for action in step.actions}
    assert pipe.schedule.name.startswith("search") or whole < 2
    assert ops == ({"F", "I", "W"} if whole == 2 else {"F", "B"})
    result = pipe.step(tokens, target=tokens)
    loss = _loss(reference(tokens), tokens)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


def test_a_model_tied_in_itself() -> None:
    model = _gpt()
    model.head.weight = model.tokens.weight
    reference, tokens = copy.deepcopy(model), torch.randint(0, 11, (4, 6))
    pipe = Pipeline(
        model, cuts=["blocks.2"], schedule="zb-h1", n_microbatches=2, ranks=2, loss_fn=_loss, transport=LocalTransport()
    )
    pipe.step(tokens, target=tokens)
    _loss(reference(tokens), tokens).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": "evenly"}, "module names, or \"balanced\"; got 'evenly'"),
        ({"cuts": ["1", "2"]}, "schedule 1f1b needs 2 stages; got 3 from cuts="),
        ({"cuts": "balanced", "ranks": 99}, r"a model of \d+ modules cannot have more stages than that; got 99"),
    ],
)
def test_models_that_do_not_fit(options: dict, message: str) -> None:
    arguments = {"schedule": "1f1b", "n_microbatches": 2, "ranks": 2, "loss_fn": F.mse_loss} | options
    if options["cuts"] == ["1", "2"]:
        arguments["schedule"] = schedule.make("1f1b", ranks=2, microbatches=2)
    with pytest.raises(PipelineError, match=message):
        Pipeline(gpt(8, 4, heads=2), transport=LocalTransport(), **arguments)


class Checkpointed(nn.Module):
    """Keeps its input alone until its I, which computes the rest again for its W."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


def test_what_i_adds_under_checkpointing_counts_for_the_limit() -> None:
    model, x = nn.Sequential(*(Checkpointed() for _ in range(4))), torch.randn(4, 8)
    options = {"n_microbatches": 4, "loss_fn": F.mse_loss, "sample": x[:1], "sample_target": x[:1], "ranks": 2}
    pipe = Pipeline(model, transport=LocalTransport(), **options)
    after = pipe.costs.memory_after_I
    assert after > 2
    assert pipe.schedule.simulate(pipe.costs).peak_memory <= 4 * after
    for limit in (after, 2):  # for less than I leaves, backwards are whole
        pipe = Pipeline(model, transport=LocalTransport(), memory_limit=limit, **options)
        assert pipe.schedule.simulate(pipe.costs).peak_memory <= limit + 1e-6
    with pytest.raises(
        ScheduleError, match=r"memory_limit must be large enough for one microbatch; got memory_limit=0.5"
    ):
        Pipeline(model, transport=LocalTransport(), memory_limit=0.5, **options)
