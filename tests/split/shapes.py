"""Small models with the shapes of graphs that libraries have: each takes an input and the numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

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


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "conditioned": Conditioned,
    "queries": Queries,
    "towers": TwoTowers,
}
"""Parts of each lead to no input."""


class Adapted(nn.Module):
    """A frozen layer, and a product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Frozen(nn.Module):
    """Adapters on layers that are frozen, the last of all too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.GELU(), nn.Linear(WIDTH, 3))
        self.layers[-1].requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layers(x)


class Derived(nn.Module):
    """Weights that are computed from others: normalized, of low rank, chosen by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.experts = nn.Parameter(torch.randn(TOKENS, WIDTH, WIDTH))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = torch.tanh(self.normed(x)) @ (self.a @ self.b).exp()
        return torch.bmm(x, self.experts[ids[:, 0]])


def inputs(needs: bool = True) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, WIDTH, requires_grad=needs), torch.randint(0, TOKENS, (2, 4))
