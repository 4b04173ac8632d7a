"""Experts that tokens are sent to by all-to-all: in one process, or on the ranks of a mesh dimension."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

DIM, EXPERTS, LAYERS = 8, 4, 4


class RoutedExperts(nn.Module):
    """Each token goes to one expert, which the gate chooses. On a mesh, each of its ranks has a part of them.

    Args:
        mesh: one dimension of a mesh; None for all experts in one process.
        grouped: compute all experts of this process by one grouped product, else one after the other.
    """

    def __init__(self, mesh: DeviceMesh | None = None, grouped: bool = False) -> None:
        super().__init__()
        self.grouped = grouped
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, DIM, 2 * DIM) / 4, torch.randn(EXPERTS, 2 * DIM, DIM) / 4
        self.group, self.ranks = (None, 1) if mesh is None else (mesh.get_group(), mesh.size())
        if mesh is not None:
            up, down = (distribute_tensor(each, mesh, [Shard(0)]) for each in (up, down))
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        found = self._send(tokens[order], counts)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return x + (found[back] * weight[:, None]).view_as(x)

    def _send(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self._experts(tokens, counts)
        theirs = torch.empty_like(counts)  # by rank that sends, and then by expert of this rank
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = theirs.view(self.ranks, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, received, sent, self.group)
        kinds = torch.arange(EXPERTS // self.ranks, device=tokens.device).repeat(self.ranks).repeat_interleave(theirs)
        order = kinds.argsort(stable=True)
        made = self._experts(arrived[order], theirs.view(self.ranks, -1).sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=tokens.device))
        return all_to_all_single_autograd(made[back], sent, received, self.group)

    def _experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        if self.grouped:
            ends = counts.cumsum(0).to(torch.int32)
            return torch._grouped_mm(F.gelu(torch._grouped_mm(tokens, up, offs=ends)), down, offs=ends)
        made = [F.gelu(part @ up[i]) @ down[i] for i, part in enumerate(tokens.split(counts.tolist()))]
        return torch.cat(made)


class MixedModel(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None, grouped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(DIM, DIM), RoutedExperts(mesh, grouped)) for _ in range(LAYERS)]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)
