"""Unmodified models over several processes, each equal to its own ``loss.backward()``: one module for gloo and NCCL.

The models are shaped like those of the libraries, which a machine with GPUs may not have: glue between the blocks,
rotary tables, masks, tied weights, labels in the forward, outputs that are dicts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, DIM, HEADS, LENGTH = 29, 32, 2, 10
IGNORED = -100


class Outputs(OrderedDict):
    """As transformers' ModelOutput: items that are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class Layer(nn.Module):
    """Attention with rotary positions and a mask that is added, and a gated MLP."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, *, table: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        scores = (_rotate(q, *table) @ _rotate(k, *table).mT) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        x = x + self.drop(self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        h = self.norms[1](x)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Decoder(nn.Module):
    """A language model: embedding, layers, a head with the embedding's weight, and its own loss."""

    def __init__(self, layers: int = 8, drop: float = 0.0, checkpoints: bool = False, adapters: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, DIM)
        nn.init.normal_(self.tokens.weight, std=0.2)
        self.layers = nn.ModuleList(Layer(drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        steps = torch.arange(0, DIM // HEADS, 2, device="cpu") / (DIM // HEADS)  # never on meta
        self.register_buffer("inv_freq", 1.0 / 100.0**steps, persistent=False)
        self.checkpoints = checkpoints
        if adapters:
            self.requires_grad_(False)
            for layer in self.layers:
                layer.qkv, layer.down = Adapted(layer.qkv), Adapted(layer.down)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Outputs:
        x = self.tokens(input_ids) * DIM**0.5
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        angle = torch.outer(place.float(), self.inv_freq).repeat(1, 2)
        table = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        allowed = place[None, :] <= place[:, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        mask = torch.where(allowed, 0.0, -1e4)
        hidden = []
        for layer in self.layers:
            if self.checkpoints and self.training:
                x = checkpoint(layer, x, table=table, mask=mask, use_reentrant=False)
            else:
                x = layer(x, table=table, mask=mask)
            hidden.append(x)
        logits = self.head(self.norm(x) + 0.1 * hidden[0])  # the first layer's output skips the stages between
        found = Outputs()
        if labels is not None:
            flat = logits[:, :-1].flatten(0, 1).float()
            found["loss"] = F.cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=IGNORED)
        found["logits"] = logits
        return found


class Unet(nn.Module):
    """Convolutions down and up: each level's output is used again on the way up."""

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(levels))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(levels))
        self.act, self.last = nn.ReLU(inplace=True), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x) + time[:, None, None, None].cos()
        kept = []
        for layer in self.down:
            x = self.act(layer(x)) * 0.9
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1)).tanh()
        return self.last(x)


class EncoderDecoder(nn.Module):
    """The encoder's output and its mask are used by every layer of the decoder; one embedding for both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, DIM)
        self.encoder = nn.ModuleList(Layer(0.0) for _ in range(3))
        self.cross = nn.ModuleList(nn.MultiheadAttention(DIM, HEADS, batch_first=True) for _ in range(4))
        self.decoder = nn.ModuleList(Layer(0.0) for _ in range(4))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, source: Tensor, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        empty = source == 0
        table = torch.ones(1, device=source.device), torch.zeros(1, device=source.device)
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory, table=table)
        x = self.shared(input_ids)
        place = torch.arange(input_ids.shape[1], device=source.device)
        mask = torch.where(place[None, :] <= place[:, None], 0.0, -1e4)
        for cross, layer in zip(self.cross, self.decoder, strict=True):
            x = x + cross(x, memory, memory, key_padding_mask=empty, need_weights=False)[0]
            x = layer(x, table=table, mask=mask)
        logits = self.head(x)
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), logits


def text(rows: int, device: str) -> dict[str, Tensor]:
    """A batch whose rows have very different numbers of labels."""
    ids = torch.randint(1, WORDS, (rows, LENGTH), device=device)
    lengths = 2 + (torch.arange(rows, device=device) * 3) % (LENGTH - 1)
    mask = (torch.arange(LENGTH, device=device) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def pairs(rows: int, device: str) -> dict[str, Tensor]:
    batch = text(rows, device)
    source = torch.randint(1, WORDS, (rows, LENGTH - 3), device=device)
    source[::2, -2:] = 0
    return {"source": source, "input_ids": batch["input_ids"], "labels": batch["labels"]}


def pictures(rows: int, device: str) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 3, 8, 8, device=device), "time": torch.rand(rows, device=device)}
