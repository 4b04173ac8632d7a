"""Train a byte-level GPT across processes: a script to read, copy and change.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --steps 50
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        examples/train_gpt.py --checkpoint runs/gpt

Every process runs this same file. Each keeps its part of the model, and gets the whole batch; only the first needs the
inputs and only the last the targets. With --checkpoint it saves as it goes, and goes on from there when it is started
again: by you, or by torchrun after a process was lost (the variable keeps one life's addresses from the next:
docs/survive.md). It uses GPUs if this machine has one for each process, and CPUs otherwise.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn import functional as F

from sternway.demo import GPT, batches, standard_library
from sternway.pipeline import Pipeline


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--schedule", help='a name, or "auto"; with --checkpoint a fixed one, for the same bits each time'
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--checkpoint", help="a folder to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=30, help="after so many seconds without a sign, a rank is lost"
    )
    arguments = parser.parse_args()
    schedule = arguments.schedule or ("zb-h1" if arguments.checkpoint else "auto")

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes on this machine
    device = torch.device("cpu")
    if torch.cuda.device_count() >= here:  # NCCL takes one process on each GPU
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights and the same batches on every rank
    data = batches(standard_library(), rows=2 * arguments.microbatches, length=64)
    x, target = (tensor.to(device) for tensor in next(data))
    model = GPT(vocabulary=256, dim=arguments.dim, heads=4, layers=8, length=64).to(device)

    pipe = Pipeline(
        model,
        cuts="balanced",
        schedule=schedule,
        n_microbatches=arguments.microbatches,
        loss_fn=loss,
        sample=x[:2] if schedule == "auto" else None,
        sample_target=target[:2],
        heartbeat_timeout=arguments.heartbeat_timeout,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    found = pipe.resume(arguments.checkpoint, optimizer) if arguments.checkpoint else None
    first = found.step if found is not None else 0
    if dist.get_rank() == 0:
        print(f"ranks: {dist.get_world_size()}, on {device.type}", flush=True)
    if found is not None and dist.get_rank() == 0:
        print(f"going on from {found.path}", flush=True)
    for step, (x, target) in enumerate(islice(data, first, arguments.steps), start=first):
        result = pipe.step(x.to(device), target=target.to(device), loss_everywhere=True)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {float(result.loss):.3f}, bubble {result.timeline.bubble_rate:.1%}", flush=True)
        if arguments.checkpoint and (step + 1) % arguments.save_every == 0:
            pipe.save(arguments.checkpoint, optimizer, step + 1, keep=3, wait=False)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
