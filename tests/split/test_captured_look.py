"""What a capture finds out about a module, on a CPU: what Python does in a forward, where an error is, stand-ins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compare import twin
from sternway._torch.cuda_graphs import all_modules, stand_ins
from sternway.split.captured._look import Uncapturable, place_of, watch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))


@pytest.mark.parametrize("kind", ["mlp", "lstm", "tied", "held elsewhere"])
def test_stand_ins_have_the_memory_and_get_the_gradients(kind: str) -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self._all = [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self._all[0]

    if kind == "tied":
        module: nn.Module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        module[1].weight = module[0].weight
    else:
        module = {"mlp": mlp, "lstm": lambda: nn.LSTM(6, 6), "held elsewhere": Elsewhere}[kind]()
    reference = twin(module)[0]
    call = (lambda m, x: m(x)[0]) if kind == "lstm" else (lambda m, x: m(x))
    x = torch.randn(3, 6)
    alive = call(module, x)  # holds the nodes of the parameters
    before = list(module.parameters())
    with stand_ins(all_modules(module), before) as made:
        assert not {id(p) for p in module.parameters()} & {id(p) for p in before}
        call(module, x).sum().backward()
        grads = [made[id(p)].grad if p.grad is None else p.grad for p in before]
    assert all(p is q for p, q in zip(module.parameters(), before, strict=True))
    call(reference, x).sum().backward()
    torch.testing.assert_close(grads, [p.grad for p in reference.parameters()])
    with torch.no_grad():
        before[0].mul_(2)
    assert not torch.equal(call(module, x), alive)


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if torch.rand(()) < 2 else x


class Hooks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: None)
        return y


class Rebinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return x - self.mean


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Leaves(), r"sets inner\.last"),
        (Counts(), r"sets inner\.calls"),
        (Rebinds(), r"sets inner\.mean"),
        (Draws(), "draws random numbers on the host"),
        (Hooks(), "registers hooks on tensors"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_python_does_in_a_forward_is_found(
    module: nn.Module, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    root = nn.Sequential()
    root.add_module("inner", module)
    with pytest.raises(Uncapturable, match=reason):
        watch(root, list(root.modules()), lambda: root(torch.ones(2, requires_grad=True)))
    watch(root, [root], lambda: None)


def test_the_place_of_an_error_is_the_users_line() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 7)

    root = nn.Sequential(nn.Identity(), nn.Sequential(Fails()))
    with pytest.raises(RuntimeError, match="invalid") as caught:
        root(torch.ones(2))
    line = Fails.forward.__code__.co_firstlineno + 1
    assert place_of(caught.value, root) == f" in the module 1.0, {__file__} line {line}"
