"""Branches that lead to no input: W's work whole, as a decoder's first layer and what conditions a diffusion model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shapes import BRANCHES, TOKENS, WIDTH, Conditioned, Decoder, Frozen, TwoTowers, inputs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, assert_split_equals_backward, names, twin
from sternway import graph, split
from zoo.deferred import measure


@pytest.mark.parametrize("make", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_they_wait(make: Callable[[], nn.Module], checkpointed: bool) -> None:
    model, (x, ids) = make(), inputs()

    def call(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(model, x, ids, use_reentrant=False) if checkpointed else model(x, ids)

    pending = assert_split_equals_backward(model, x, ids, call=call, rtol=1e-4, atol=1e-5)
    assert {name for name, p in model.named_parameters() if p.ndim > 1} <= names(model, pending.deferred)

    deferral = measure(lambda: (call(model, x, ids), [x]))
    assert deferral.extra == 0
    assert deferral.share > 0.95


def test_one_branch_behind_another_runs_in_i() -> None:
    """I asks for the gradient of the bias, which later layers use; the first layer is on the way to it."""
    pending = assert_split_equals_backward(Decoder(shared=True), *inputs(), rtol=1e-4, atol=1e-5)
    assert pending.deferred


@pytest.mark.parametrize("make", BRANCHES.values(), ids=BRANCHES)
def test_the_first_stage(make: Callable[[], nn.Module]) -> None:
    """Nothing leads to an input there."""
    model, (x, ids) = make(), inputs()
    pending = assert_split_equals_backward(model, x.detach(), ids, rtol=1e-4, atol=1e-5)
    ready = {name for name in names(model, pending.ready) if model.get_parameter(name).ndim > 1}
    assert ready <= {"queries", "text.1.weight"}  # on the left of a product, and on both sides of one


def test_the_first_stage_of_a_frozen_model_is_divided_too() -> None:
    """A frozen layer's activation stands where a weight might; I did nothing, and W the whole backward."""
    model, (x, ids) = Frozen(), inputs(needs=False)
    pending = assert_split_equals_backward(model, x, ids, rtol=1e-4, atol=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(pending.deferred) == len(trained)
    first = measure(lambda: (model(x, ids), []))
    tokens = x.numel() // WIDTH
    assert first.w == sum(2 * tokens * parameter.numel() for parameter in trained)
    assert first.extra == 0


@pytest.mark.parametrize("make", BRANCHES.values(), ids=BRANCHES)
def test_parameter_hooks_run_once_on_the_whole_gradient(make: Callable[[], nn.Module]) -> None:
    model, (x, ids) = make(), inputs()
    reference = twin(model)[0]
    logs: list[dict[str, list[Tensor]]] = [{}, {}]
    for each, log in zip((model, reference), logs, strict=True):
        for name, parameter in each.named_parameters():
            parameter.register_hook(lambda grad, name=name, log=log: log.setdefault(name, []).append(grad.clone()))
    reference(x, ids).square().sum().backward()
    x.grad = None
    split.backward_input(model(x, ids).square().sum(), None, x)[1].run()
    assert logs[0].keys() == logs[1].keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(logs[0], logs[1], rtol=1e-4, atol=1e-5)
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("retained", [False, True])
def test_hooks_on_what_a_branch_made_run_once(retained: bool) -> None:
    """I asks for the gradient where a branch begins, which runs the hooks there; W would run them once more."""
    grads: list[Tensor] = []

    def step(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        condition = model.time(ids[:, :1] / TOKENS)
        scale = model.modulations[0](condition).unsqueeze(1)
        seen.append(scale)
        if retained:
            scale.retain_grad()
        else:
            scale.register_hook(lambda grad: grads.append(grad.clone()) or grad * 2)
        return (x * scale[..., :WIDTH]).square().sum()

    model, (x, ids) = Conditioned(), inputs()
    reference = twin(model)[0]
    seen: list[Tensor] = []
    step(reference, x, ids).backward()
    x.grad = None
    split.backward_input(step(model, x, ids), None, x)[1].run()
    assert_same_grads(model, reference)
    if retained:
        torch.testing.assert_close(seen[1].grad, seen[0].grad)
    else:
        assert len(grads) == 2
        torch.testing.assert_close(grads[1], grads[0])


def test_a_branch_that_no_gradient_arrives_at() -> None:
    """Hooks on its parameters run all the same, with no gradient, as in a plain backward."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
            return x + other

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    calls: list[list[Tensor | None]] = []
    for halves in (False, True):
        torch.manual_seed(0)
        layer, table = nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)
        x, ids = torch.randn(2, WIDTH, requires_grad=True), torch.tensor([1, 2])
        log: list[Tensor | None] = []
        layer.weight.register_hook(log.append)
        table(ids)
        loss = Stop.apply(x, layer(table(ids))).sum()
        if halves:
            (grad,), pending = split.backward_input(loss, None, [x])
            pending.run()
            assert torch.equal(grad, torch.ones_like(x))
        else:
            loss.backward()
        assert layer.weight.grad is None
        assert table.weight.grad is None
        calls.append(log)
    assert calls[0] == calls[1]


def test_a_parameter_that_i_computes_keeps_a_branch_in_i() -> None:
    """The norm's weight is ready in I; the engine would go through a branch that leads to it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            branch = self.layer(self.weight * torch.ones(4, WIDTH)).sum(0)
            return F.layer_norm(x, (WIDTH,), self.weight) + branch

    model = Shared()
    pending = assert_split_equals_backward(model, *inputs())
    assert names(model, pending.ready) == {"weight"}
    assert names(model, pending.deferred) == {"layer.weight", "layer.bias"}


def test_an_output_that_no_input_reaches() -> None:
    model, (x, ids) = TwoTowers(), inputs()
    reference, their_x = twin(model, x)
    grads = [torch.randn(2, 6, WIDTH), torch.randn(2, 4, WIDTH)]
    torch.autograd.backward([reference.image(their_x), reference.text(ids)], grads)
    grad, pending = split.backward_input((model.image(x), model.text(ids)), tuple(grads), x)
    torch.testing.assert_close(grad, their_x.grad)
    assert len(pending.deferred) == len(list(model.parameters()))
    pending.run()
    assert_same_grads(model, reference)


class CompiledCall(nn.Module):
    """A layer in a compiled function. Dynamo passes over torch's own modules, in some releases, if compiled alone."""

    def __init__(self, inner: nn.Linear, **options: Any) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight
        self._call = torch.compile(lambda x: inner(x), **options)

    def forward(self, x: Tensor) -> Tensor:
        return self._call(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("backend", ["sternway", "aot_eager"])
def test_a_compiled_graph_in_a_branch(backend: str) -> None:
    """Ours waits whole. What another backend has compiled is computed in I, and waits in the Pending."""
    model, (x, ids) = TwoTowers(), inputs()
    reference = twin(model)[0]
    compiled = CompiledCall(
        model.text[1], backend=backend, options={"inner": "eager"} if backend == "sternway" else None
    )
    model.text[1] = compiled
    loss = model(x, ids).square().sum()
    assert "CompiledFunctionBackward" in {node.kind for node in graph.capture(loss).nodes}
    pending = split.backward_input(loss, None, x)[1]
    ready = [] if backend == "sternway" else [compiled.inner.weight, compiled.inner.bias]
    assert {id(each) for each in pending.ready} == {id(each) for each in ready}
    assert len(pending.deferred) == len(list(model.parameters())) - len(ready)
    pending.run()
    reference(x, ids).square().sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_preview_names_where_a_branch_begins() -> None:
    model, (x, ids) = TwoTowers(), inputs()
    found = split.preview((model.image(x), model.text(ids)), x)
    by_leaf = {id(leaf.variable): each.node for each in found.deferred for leaf in each.leaves}
    assert by_leaf[id(model.text[0].weight)] is by_leaf[id(model.text[1].weight)]
    assert type(by_leaf[id(model.text[0].weight)]).__name__ == "GeluBackward0"
