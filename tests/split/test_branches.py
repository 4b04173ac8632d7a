"""Branches that lead to no input: W's work whole, as a decoder's first layer and what conditions a diffusion model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare import assert_same_grads, assert_split_equals_backward, names, twin
from sternway import split
from zoo.deferred import measure

WIDTH, TOKENS = 8, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        scores = (self.q(x) @ self.k(context).mT + bias).softmax(-1)
        return self.out(scores @ self.v(context))


class Decoder(nn.Module):
    """Tokens, and the input only by cross attention; a learned bias of positions for all layers, and a tied head."""

    def __init__(self, layers: int = 4, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * layers))
        self.attentions = nn.ModuleList(Attention() for _ in range(2 * layers))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden, bias = self.tokens(ids), self.places(ids)[..., 0].unsqueeze(-2)
        for at, (norm, attention) in enumerate(zip(self.norms, self.attentions, strict=True)):
            normed, own = norm(hidden), bias if self.shared else bias.clone()
            hidden = hidden + (attention(normed, x) if at % 2 else attention(normed, normed, own))
        return self.head(hidden)


class Conditioned(nn.Module):
    """Blocks whose scales, shifts and gates come from what needs no gradient, as in a diffusion transformer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.label = nn.Embedding(TOKENS, WIDTH)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.modulations = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        condition = self.time(ids[:, :1] / TOKENS) + self.label(ids[:, 0])
        for modulation, block in zip(self.modulations, self.blocks, strict=True):
            scale, shift, gate = modulation(F.silu(condition)).unsqueeze(1).chunk(3, -1)
            x = x + gate * block(F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift)
        return x


class Queries(nn.Module):
    """Learned queries, which are made up before they meet the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, WIDTH))
        self.mix, self.attend = Attention(), Attention()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        queries = self.queries + self.mix(self.queries, self.queries)
        return self.attend(queries.expand(len(x), 5, WIDTH), x)


class TwoTowers(nn.Module):
    """A tower of its own for each input, met in a product; and an output that only parameters reach."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.image = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.image(x) @ self.text(ids).mT + (self.text[1].weight @ self.text[1].weight).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "conditioned": Conditioned,
    "queries": Queries,
    "towers": TwoTowers,
}


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, WIDTH, requires_grad=True), torch.randint(0, TOKENS, (2, 4))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_they_wait(make: Callable[[], nn.Module], checkpointed: bool) -> None:
    model, (x, ids) = make(), _inputs()

    def call(model: nn.Module, x: Tensor, ids: Tensor) -> Tensor:
        return checkpoint(model, x, ids, use_reentrant=False) if checkpointed else model(x, ids)

    pending = assert_split_equals_backward(model, x, ids, call=call, rtol=1e-4, atol=1e-5)
    assert {name for name, p in model.named_parameters() if p.ndim > 1} <= names(model, pending.deferred)

    deferral = measure(lambda: (call(model, x, ids), [x]))
    assert deferral.extra == 0
    assert deferral.share > 0.95


def test_one_branch_behind_another_runs_in_i() -> None:
    """I asks for the gradient of the bias, which later layers use; the first layer is on the way to it."""
    pending = assert_split_equals_backward(Decoder(shared=True), *_inputs(), rtol=1e-4, atol=1e-5)
    assert pending.deferred


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_first_stage(make: Callable[[], nn.Module]) -> None:
    """Nothing leads to an input there."""
    model, (x, ids) = make(), _inputs()
    pending = assert_split_equals_backward(model, x.detach(), ids, rtol=1e-4, atol=1e-5)
    ready = {name for name in names(model, pending.ready) if model.get_parameter(name).ndim > 1}
    assert ready <= {"queries", "text.1.weight"}  # on the left of a product, and on both sides of one


class Adapted(nn.Module):
    """A frozen layer, and a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def test_the_first_stage_of_a_frozen_model_is_divided_too() -> None:
    """A frozen layer's activation stands where a weight might; I did nothing, and W the whole backward."""
    model, x = nn.Sequential(*(Adapted() for _ in range(4)), nn.Linear(WIDTH, 3).requires_grad_(False)), _inputs()[0]
    x = x.detach()
    pending = assert_split_equals_backward(model, x, rtol=1e-4, atol=1e-5)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(pending.deferred) == len(trained)
    first = measure(lambda: (model(x), []))
    tokens = x.numel() // WIDTH
    assert first.w == sum(2 * tokens * parameter.numel() for parameter in trained)
    assert first.extra == 0


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameter_hooks_run_once_on_the_whole_gradient(make: Callable[[], nn.Module]) -> None:
    model, (x, ids) = make(), _inputs()
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

    model, (x, ids) = Conditioned(), _inputs()
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
    pending = assert_split_equals_backward(model, *_inputs())
    assert names(model, pending.ready) == {"weight"}
    assert names(model, pending.deferred) == {"layer.weight", "layer.bias"}


def test_preview_names_where_a_branch_begins() -> None:
    model, (x, ids) = TwoTowers(), _inputs()
    found = split.preview((model.image(x), model.text(ids)), x)
    by_leaf = {id(leaf.variable): each.node for each in found.deferred for leaf in each.leaves}
    assert by_leaf[id(model.text[0].weight)] is by_leaf[id(model.text[1].weight)]
    assert type(by_leaf[id(model.text[0].weight)]).__name__ == "GeluBackward0"
