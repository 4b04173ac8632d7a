"""Experts on the ranks of a mesh dimension: tokens go to them and back by all-to-all, inside a stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from gloo import on_ranks
from parallel_models import whole
from sternway.pipeline import Pipeline

DIM, EXPERTS, LAYERS = 8, 4, 4


class RoutedExperts(nn.Module):
    """Each token goes to one expert, which the gate chooses. On a mesh, each of its ranks has a part of them."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
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
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return x + (found[back] * weight[:, None]).view_as(x)

    def _send(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            return self._experts(tokens, counts)
        theirs = torch.empty_like(counts)  # by rank that sends, and then by expert of this rank
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = theirs.view(self.ranks, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, received, sent, self.group)
        kinds = torch.arange(EXPERTS // self.ranks).repeat(self.ranks).repeat_interleave(theirs)
        order = kinds.argsort(stable=True)
        made = self._experts(arrived[order], theirs.view(self.ranks, -1).sum(0))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return all_to_all_single_autograd(made[back], sent, received, self.group)

    def _experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        made = [F.gelu(part @ up[i]) @ down[i] for i, part in enumerate(tokens.split(counts.tolist()))]
        return torch.cat(made)


class MixedModel(nn.Module):
    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(DIM, DIM), RoutedExperts(mesh)) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _train(rank: int, schedule: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    reference, model = MixedModel(), MixedModel(mesh["ep"])
    options: Any = {"sample": torch.randn(2, 3, DIM)} if schedule == "auto" else {}
    options |= {"mesh": mesh, "data_dims": ["ep"]}  # each rank of experts has rows of its own
    pipe = Pipeline(model, schedule=schedule, n_microbatches=4, loss_fn=F.mse_loss, **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (pipe, reference)]
    expected = dict(reference.named_parameters())
    counts = set()
    for step in range(3):
        torch.manual_seed(step)
        x, target = torch.randn(2, 8, 3, DIM), torch.randn(2, 8, 3, DIM)  # rows of one rank, and of the other
        loss = F.mse_loss(reference(x.flatten(0, 1)), target.flatten(0, 1))
        loss.backward()
        result = pipe.step(x[place], target=target[place], loss_everywhere=True)
        mean = result.loss.clone()
        dist.all_reduce(mean, group=group)
        torch.testing.assert_close(mean / 2, loss.detach())
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(
                    whole(parameter.grad),
                    expected[name].grad,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
            chosen = reference.layers[0][1].gate(reference.layers[0][0](x[place].flatten(0, 1))).argmax(-1)
            counts |= set(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not any(each._backward_hooks for each in pipe.parameters()), "another pipeline would divide again"
    assert len(counts) > 2, "the experts got different numbers of tokens"
    pipe.close()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "auto"])
def test_pipelines_of_experts(schedule: str) -> None:
    on_ranks(4, _train, schedule)
