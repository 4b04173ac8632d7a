"""Parameters used in more than one way: twice, tied, as a weight and otherwise, parametrized, in slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from compare import assert_split_equals_backward, names


class Tied(nn.Module):
    """A token table that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.middle = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.tokens(tokens)).relu())


def test_used_twice() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(5, 4, requires_grad=True)
    pending = assert_split_equals_backward(layer, x, call=lambda m, x: m(m(x).tanh()))
    assert names(layer, pending.deferred) == {"weight", "bias"}


def test_a_parameter_on_both_sides_of_a_product() -> None:
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(5, 4, requires_grad=True)
    assert_split_equals_backward(layer, x, call=lambda m, x: x @ (m.weight @ m.weight))
    layer = nn.Linear(4, 4, bias=False)
    assert_split_equals_backward(layer, x, call=lambda m, x: m.weight @ m.weight + x[:4])


def test_tied_within_the_stage() -> None:
    model = Tied()
    pending = assert_split_equals_backward(model, torch.randint(0, 7, (3, 5)))
    assert "tokens.weight" in names(model, pending.deferred)


def test_as_a_weight_and_otherwise() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(5, 4, requires_grad=True)
    pending = assert_split_equals_backward(layer, x, call=lambda m, x: (m(x) * m.weight.sum(0)).sum() + m.weight.norm())
    assert names(layer, pending.ready) == {"weight"}  # the engine computes every path to a leaf, or none
    assert names(layer, pending.deferred) == {"bias"}


def test_the_same_derived_weight_as_a_weight_and_otherwise() -> None:
    """Its graph can run only once: in W, with the gradients of both uses."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.a @ self.b
            return (x @ weight).tanh().sum() + weight.exp().sum()

    model = LowRank()
    pending = assert_split_equals_backward(model, torch.randn(5, 4, requires_grad=True))
    assert names(model, pending.deferred) == {"a", "b"}


def test_a_derived_weight_used_twice_waits() -> None:
    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.a @ self.b
            return (x @ weight).tanh() @ weight + x @ self.a @ self.b

    model = LowRank()
    pending = assert_split_equals_backward(model, torch.randn(5, 4, requires_grad=True), rtol=1e-4, atol=1e-5)
    assert names(model, pending.deferred) == {"a", "b"}


def test_weight_norm() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    x = torch.randn(5, 4, requires_grad=True)
    pending = assert_split_equals_backward(layer, x, call=lambda m, x: m(x).tanh())
    assert names(layer, pending.deferred) == {name for name, _ in layer.named_parameters()}


def test_spectral_norm() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(4, 4)).eval()
    x = torch.randn(5, 4, requires_grad=True)
    pending = assert_split_equals_backward(layer, x)
    assert len(pending.deferred) == 2


class Lora(nn.Module):
    """A linear layer whose weight has a trained low-rank part; the full one frozen or not."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(not frozen)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


def test_low_rank_update_of_a_weight() -> None:
    for first_stage in (False, True):
        for frozen in (False, True):
            model = nn.Sequential(Lora(frozen=frozen), nn.Tanh(), Lora(frozen=frozen))
            pending = assert_split_equals_backward(
                model, torch.randn(5, 4, requires_grad=not first_stage), rtol=1e-4, atol=1e-5
            )
            trained = {name for name, p in model.named_parameters() if p.requires_grad}
            assert names(model, pending.deferred) == trained


def test_slices_of_one_fused_weight() -> None:
    layer = nn.Linear(4, 12)

    def attention(layer: nn.Linear, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w, b) for w, b in zip(layer.weight.chunk(3), layer.bias.chunk(3), strict=True))
        return F.scaled_dot_product_attention(q, k, v)

    pending = assert_split_equals_backward(layer, torch.randn(2, 5, 4, requires_grad=True), call=attention)
    assert names(layer, pending.deferred) == {"weight", "bias"}


def test_attention_written_out_has_products_without_weights() -> None:
    for first_stage in (False, True):
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 5, 8, requires_grad=not first_stage)
        pending = assert_split_equals_backward(layer, x, call=lambda m, x: m(x, x, x)[0], rtol=1e-4, atol=1e-5)
        assert {"in_proj_weight", "out_proj.weight"} <= names(layer, pending.deferred)


def test_learned_queries_against_an_input() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.queries @ self.keys(x).mT, -1) @ x

    for first_stage in (False, True):
        assert_split_equals_backward(Pool(), torch.randn(2, 5, 4, requires_grad=not first_stage))
