"""Whole models compiled into F, I and W: split, and in an ordinary backward, they equal eager."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, gpt
from test_models import WAITS
from torch import nn

from compare import assert_same_grads, names, twin
from compiled import assert_compiled_equals_backward, compiled
from sternway import schedule, split
from sternway.demo import GPT
from sternway.pipeline import LocalTransport, Pipeline

pytestmark = pytest.mark.filterwarnings("default:::torch")  # Dynamo and Inductor warn of themselves
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_split_equals_backward(name: str, first_stage: bool) -> None:
    make, shape = MODELS[name]
    model = make()
    x = torch.randn(shape, requires_grad=not first_stage)
    pending = assert_compiled_equals_backward(model, x, **TOLERANCE)
    deferred = names(model, pending.deferred)
    for suffix in WAITS[name]:
        wanted = {n for n, _ in model.named_parameters() if n == suffix or n.endswith("." + suffix)}
        assert wanted <= deferred, f"not deferred: {sorted(wanted - deferred)}"


@pytest.mark.parametrize("first_stage", [False, True], ids=["middle", "first"])
def test_inductor(first_stage: bool) -> None:
    model = gpt(16, 2)
    x = torch.randn(2, 5, 16, requires_grad=not first_stage)
    pending = assert_compiled_equals_backward(model, x, inner="inductor", **TOLERANCE)
    (graphs,) = split.inspect(model)
    norms = {n for n, _ in model.named_parameters() if "norm" in n}
    if first_stage:
        assert names(model, pending.ready) <= norms
        assert graphs.I.flops > 0.4 * graphs.W.flops  # the spine is there: lower layers wait for upper ones
    else:
        assert names(model, pending.ready) == norms
        assert graphs.I.flops == graphs.W.flops + _attention(graphs.I)
        assert graphs.held_after_i <= graphs.held_after_f


def _attention(graph: split.CompiledGraph) -> int:
    return sum(node.flops for node in graph.nodes if "attention" in node.op)


def test_inductor_with_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    pending = assert_compiled_equals_backward(
        model, torch.randn(2, 3, 6, 6, requires_grad=True), inner="inductor", **TOLERANCE
    )
    assert not pending.ready


@pytest.mark.parametrize("name", ["gpt", "convnet", "recurrent"])
def test_an_ordinary_backward(name: str) -> None:
    make, shape = MODELS[name]
    model = make()
    reference, x, their_x = *twin(model), torch.randn(shape, requires_grad=True), None
    their_x = x.detach().clone().requires_grad_()
    fast = compiled(model)
    for _ in range(2):
        y, their_y = fast(x), reference(their_x)
        torch.testing.assert_close(y, their_y, **TOLERANCE)
        g = torch.randn_like(y)
        y.backward(g)
        their_y.backward(g)
    torch.testing.assert_close(x.grad, their_x.grad, **TOLERANCE)
    assert_same_grads(model, reference, **TOLERANCE)


def test_a_gpt_from_tokens_to_loss() -> None:
    model = GPT(vocabulary=11, dim=16, heads=2, layers=2, length=6)
    tokens = torch.randint(0, 11, (3, 6))

    def loss(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    pending = assert_compiled_equals_backward(model, tokens, call=loss)
    assert {"tokens.weight", "positions.weight", "head.weight"} <= names(model, pending.deferred)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_schedules_with_compiled_stages(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=4)
    models = [gpt(8, 1, heads=2) for _ in range(plan.num_stages)]
    reference = nn.Sequential(*(twin(model)[0] for model in models))
    pipe = Pipeline(
        {index: compiled(model) for index, model in enumerate(models)},
        schedule=plan,
        loss_fn=nn.functional.mse_loss,
        transport=LocalTransport(),
    )
    for _ in range(2):
        x, target = torch.randn(8, 4, 8), torch.randn(8, 4, 8)
        result = pipe.step(x, target=target)
        loss = nn.functional.mse_loss(reference(x), target)
        loss.backward()
        torch.testing.assert_close(result.loss, loss.detach())
    for model, theirs in zip(models, reference, strict=True):
        assert_same_grads(model, theirs, rtol=1e-3, atol=1e-5)
        (graphs, *_) = split.inspect(model)
        assert graphs.late >= 8
