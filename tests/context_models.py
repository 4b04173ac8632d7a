"""A small GPT whose sequence may be spread over the ranks of a mesh dimension: each has one slice of every row.

Three ways to let each position see those before it, as users write them:

    heads    all-to-all before and after: each rank has all positions of some heads (Ulysses)
    swap     the same, by DTensors
    gather   each rank gathers the keys and values of all positions, for the queries of its own
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

VOCABULARY, LENGTH, DIM, HEADS = 16, 8, 8, 4
# Its name in newer torch, and in older.
_NAME = "all_gather_single_autograd"
_gathered = getattr(collectives, _NAME if hasattr(collectives, _NAME) else "all_gather_tensor_autograd")


class ContextAttention(nn.Module):
    """Causal attention over the slices of all ranks.

    Args:
        mesh: one dimension of a mesh; None for the whole sequence in one process.
        way: "heads", "swap" or "gather".
    """

    def __init__(self, mesh: DeviceMesh | None, way: str) -> None:
        super().__init__()
        self.group, self.ranks, self.place = (
            (None, 1, 0) if mesh is None else (mesh.get_group(), mesh.size(), mesh.get_local_rank())
        )
        self.way, self.mesh = way, mesh
        self.project, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.project(x).chunk(3, -1))  # rows, positions, heads
        if self.group is None:
            found = _attend(q, k, v, 0)
        elif self.way in ("heads", "swap"):
            found = self._to_positions(_attend(*(self._to_heads(each) for each in (q, k, v)), 0))
        else:
            keys, values = (_gathered(each.contiguous(), 1, self.group) for each in (k, v))
            found = _attend(q, keys, values, self.place * q.shape[1])
        return self.out(found.flatten(-2))

    def _to_heads(self, x: Tensor) -> Tensor:
        """From a slice with all heads to all positions with some heads."""
        if self.way == "swap":
            return self._swap(x, 1, 2)
        parts = torch.stack(x.chunk(self.ranks, 2))
        return torch.cat(self._exchange(parts).unbind(), 1)

    def _to_positions(self, x: Tensor) -> Tensor:
        """And back."""
        if self.way == "swap":
            return self._swap(x, 2, 1)
        parts = torch.stack(x.chunk(self.ranks, 1))
        return torch.cat(self._exchange(parts).unbind(), 2)

    def _swap(self, x: Tensor, before: int, after: int) -> Tensor:
        assert self.mesh is not None
        swapped = DTensor.from_local(x, self.mesh, [Shard(before)]).redistribute(placements=[Shard(after)])
        return swapped.to_local()

    def _exchange(self, parts: Tensor) -> Tensor:
        assert self.group is not None
        ones = [1] * self.ranks
        return collectives.all_to_all_single_autograd(parts.contiguous(), ones, ones, self.group)


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """Attention of queries whose positions begin at ``first`` to the keys of positions from 0 on."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    places = torch.arange(k.shape[2], device=q.device)
    seen = places <= first + torch.arange(q.shape[2], device=q.device)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


class ContextBlock(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, way: str) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = ContextAttention(mesh, way)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class ContextGPT(nn.Module):
    """Tokens to logits. Positions count from the first one of this rank's slice."""

    def __init__(self, mesh: DeviceMesh | None = None, way: str = "heads", layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place = 0 if mesh is None else mesh.get_local_rank()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(ContextBlock(mesh, way) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device) + self.place * length
        x = self.tokens(tokens) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the labels that are not -100, and how many these are."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def context_batch(step: int, rows: int = 8, masked: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens, and the labels of each. If masked, most of the first half of each row has none, and some of the rest."""
    seeded = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=seeded)
    labels = tokens[:, 1:].clone()
    if masked:
        labels[:, : LENGTH // 2 - 1] = -100
        labels[::3, -2:] = -100
    return tokens[:, :-1], labels


def slice_of(tensors: tuple[Tensor, Tensor], mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """This rank's positions."""
    first, second = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()].to(mesh.device_type) for each in tensors)
    return first, second
