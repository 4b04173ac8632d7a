"""What tests of captured modules share: models, batches, and the comparison with the split without graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from models import MODELS, gpt
from torch import Tensor, nn
from torch.nn import functional as F

from compare import assert_same_grads
from sternway import split


class Language(nn.Module):
    """Token ids in, logits out; the table is used twice."""

    def __init__(self, tokens: int = 50, dim: int = 32) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(tokens, dim), gpt(dim, 2)
        self.head = nn.Linear(dim, tokens, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.table(ids)))
        return out


class Adapted(nn.Module):
    """Weights that are made of others, one that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3))
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight + self.a @ self.b)
        return F.linear(self.frozen(h).relu(), self.weight[:8])


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.4), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))


def ids(*shape: int) -> Tensor:
    return torch.randint(50, shape, device="cuda")


def floats(*shape: int, first: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", requires_grad=not first)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    **{name: (make, lambda shape=shape: floats(*shape)) for name, (make, shape) in MODELS.items()},
    "larger gpt": (lambda: gpt(64, 2), lambda: floats(4, 32, 64)),
    "first stage": (lambda: gpt(16, 2), lambda: floats(2, 5, 16, first=True)),
    "language": (Language, lambda: ids(2, 9)),
    "adapted": (Adapted, lambda: floats(4, 16)),
    "dropout": (dropout, lambda: floats(8, 16)),
}


def step(call: Any, x: Tensor, grad: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
    """F, I and W; the output and the input's gradient."""
    torch.manual_seed(seed)
    y = call(x)
    found, pending = split.backward_input(y, grad, x if x.requires_grad else ())
    pending.run()
    return y.detach(), found if x.requires_grad else None


def assert_same_bits(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            worst = float((p.grad - q.grad).abs().max())
            assert torch.equal(p.grad, q.grad), f"{name} differs by {worst:.1e} of {float(q.grad.abs().max()):.1e}"
    for (name, p), q in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(p, q), name


def compare(model: nn.Module, make: Callable[[], Tensor], wrap: Any = None, rounds: int = 3) -> split.Captured:
    """Captured, split and plain, in turn."""
    eager, plain = copy.deepcopy(model), copy.deepcopy(model)
    wrap = wrap or (lambda call, x: call(x))
    state = copy.deepcopy(model.state_dict())
    x = make()
    shape = wrap(plain, x)
    plain.load_state_dict(state)
    stage = wrap(lambda x: split.capture(model, x), x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), f"{name} changed by the capture"
    assert all(p.grad is None for p in model.parameters())
    for seed in range(rounds):
        x = make()
        others = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)]
        grad = torch.randn_like(shape)
        mine = step(lambda x: wrap(stage, x), x, grad, seed)
        theirs = step(lambda x: wrap(eager, x), others[0], grad, seed)
        assert torch.equal(mine[0], theirs[0]), "outputs"
        assert mine[1] is None or torch.equal(mine[1], theirs[1]), "input gradients"
        torch.manual_seed(seed)
        wrap(plain, others[1]).backward(grad)
        if mine[1] is not None:
            torch.testing.assert_close(mine[1], others[1].grad, rtol=2e-2, atol=2e-3)
    assert_same_bits(model, eager)
    assert_same_grads(model, plain, rtol=2e-2, atol=2e-3)
    assert stage.refusals == []
    assert stage.sets == stage.in_flight
    return stage
