"""Train a byte-level GPT on a mesh: stages along one dimension, each stage's parameters sharded along the other.

    torchrun --standalone --nproc-per-node 4 examples/train_sharded.py --steps 50

Every process runs this same file. The processes of a column hold the stages of one pipeline. Those of a row have the
same stage, hold a shard of its parameters each, and get different rows of the batch. It uses GPUs if this machine has
one for each process, and CPUs otherwise.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from sternway.demo import GPT, batches, standard_library
from sternway.pipeline import Pipeline


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", default="zb-v")
    parser.add_argument("--stages", type=int, default=2, help="pipeline ranks; the others share each stage")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes on this machine
    device = torch.device("cpu")
    if torch.cuda.device_count() >= here:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    shards = dist.get_world_size() // arguments.stages
    mesh = init_device_mesh(device.type, (arguments.stages, shards), mesh_dim_names=("pp", "dp_shard"))
    torch.manual_seed(0)  # the same weights and the same batches on every rank
    data = batches(standard_library(), rows=2 * arguments.microbatches * shards, length=64)
    model = GPT(vocabulary=256, dim=arguments.dim, heads=4, layers=8, length=64).to(device)

    def shard(stage: nn.Module) -> None:
        """Shard each block of a stage, and the embeddings and the head, which are modules of their own."""
        for module in stage.modules():
            if isinstance(module, nn.Embedding | type(model.blocks[0])) or module is model.head:
                fully_shard(module, mesh=mesh["dp_shard"])

    mine = mesh.get_local_rank("dp_shard")
    x, target = (tensor.to(device).chunk(shards)[mine] for tensor in next(data))
    pipe = Pipeline(
        model,
        schedule=arguments.schedule,
        n_microbatches=arguments.microbatches,
        loss_fn=loss,
        sample=x[:2],
        sample_target=target[:2],
        mesh=mesh,
        shard=shard,
    )
    if dist.get_rank() == 0:
        print(pipe, flush=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, foreach=False)
    for step, (x, target) in enumerate(islice(data, arguments.steps)):
        x, target = (tensor.to(device).chunk(shards)[mine] for tensor in (x, target))
        result = pipe.step(x, target=target, loss_everywhere=True)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {float(result.loss):.3f}, bubble {result.timeline.bubble_rate:.1%}", flush=True)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
