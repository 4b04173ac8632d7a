"""Small models in plain torch, one for each family of operations: for the benchmarks, and for the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sternway.demo import GPTBlock


def gpt(dim: int, layers: int, heads: int = 4) -> nn.Module:
    return nn.Sequential(*(GPTBlock(dim, heads) for _ in range(layers)))


class LlamaBlock(nn.Module):
    """RMS norm, rotary positions, grouped-query attention, SwiGLU; no biases."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[-2], device=x.device)[:, None]
        rates = 10000.0 ** (-torch.arange(0, self.size, 2, device=x.device) / self.size)
        angle = (steps * rates).to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
        return torch.stack(turned, -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (self.rotate(k), v))
        mixed = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama(dim: int, layers: int, heads: int = 4, groups: int = 2) -> nn.Module:
    return nn.Sequential(*(LlamaBlock(dim, heads, groups) for _ in range(layers)))


class ResidualConv(nn.Module):
    """Two 3×3 convolutions with batch norm, and a way round them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


def convnet(channels: int, layers: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), *(ResidualConv(channels) for _ in range(layers))
    )


class Experts(nn.Module):
    """A mixture of experts: every token weighs every expert, whose weights are one 3-D parameter each."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        share = self.router(tokens).softmax(-1)
        h = F.silu(torch.bmm(tokens.expand(len(self.up), -1, -1), self.up))
        every = torch.einsum("enh,ehd->end", h, self.down)
        return x + torch.einsum("ne,end->nd", share, every).view_as(x)


class Recurrent(nn.Module):
    """An LSTM and a GRU, one after the other."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gru(self.lstm(x)[0])[0]
        return out


class ViT(nn.Module):
    """Patches by a strided convolution, a learned token and positions, blocks, a head."""

    def __init__(self, dim: int, layers: int, patches: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.places = nn.Parameter(torch.randn(1, patches + 1, dim))
        self.blocks = nn.Sequential(*(GPTBlock(dim, 2) for _ in range(layers)))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.places
        out: Tensor = self.head(self.blocks(x)[:, 0])
        return out


MODELS = {  # each family at its smallest, with the shape of an input
    "gpt": (lambda: gpt(16, 2), (2, 5, 16)),
    "llama": (lambda: llama(16, 2), (2, 5, 16)),
    "convnet": (lambda: convnet(8, 2), (2, 3, 8, 8)),
    "experts": (lambda: Experts(8, 3), (2, 5, 8)),
    "recurrent": (lambda: Recurrent(6), (2, 5, 6)),
    "vit": (lambda: ViT(8, 2, 4), (2, 3, 8, 8)),
}
