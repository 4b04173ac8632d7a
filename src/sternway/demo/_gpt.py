"""A small GPT in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    """Pre-norm attention and a four-times-wide MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        wide: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + wide


class GPT(nn.Module):
    """Embeddings, blocks and an untied head."""

    def __init__(self, vocabulary: int, dim: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(GPTBlock(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return logits


class GPTStage(nn.Module):
    """Some blocks of a GPT, with the embeddings if they are the first and the head if they are the last.

    For torch's own schedules, which take modules from tensors to tensors. Sternway cuts the GPT by itself.
    """

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        blocks = list(model.blocks)
        start, end = len(blocks) * index // count, len(blocks) * (index + 1) // count
        self.tables = nn.ModuleList([model.tokens, model.positions] if index == 0 else [])
        self.layers = nn.Sequential(*blocks[start:end], *([model.norm, model.head] if index == count - 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        if self.tables:
            tokens, positions = self.tables
            x = tokens(x) + positions(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.layers(x)
        return out
