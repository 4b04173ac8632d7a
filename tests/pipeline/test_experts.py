"""Experts on the ranks of a mesh dimension: tokens go to them and back by all-to-all, inside a stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from expert_models import DIM, EXPERTS, MixedModel
from gloo import on_ranks
from parallel_models import whole
from sternway.pipeline import Pipeline


def _train(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    group, place = mesh.get_group("ep"), mesh.get_local_rank("ep")
    reference, model = MixedModel(), MixedModel(mesh["ep"])
    options: Any = {"mesh": mesh, "data_dims": ["ep"]}  # each rank of experts has rows of its own
    pipe = Pipeline(model, schedule="zb-h1", n_microbatches=4, loss_fn=F.mse_loss, **options)
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
            chosen = reference.blocks[0][1].gate(reference.blocks[0][0](x[place].flatten(0, 1))).argmax(-1)
            counts |= set(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert not any(each._backward_hooks for each in pipe.parameters()), "another pipeline would divide again"
    assert len(counts) > 2, "the experts got different numbers of tokens"
    pipe.close()


def test_experts_get_uneven_numbers_of_tokens() -> None:
    on_ranks(4, _train)
