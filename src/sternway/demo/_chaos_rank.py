"""What each process of ``train_with_kills`` does: train, save checkpoints, kill itself when told to."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sternway.demo._chaos import ChaosOptions
from sternway.demo._device import backend_of, take_device
from sternway.demo._gpt import GPT
from sternway.demo._text import batches, next_byte_loss, standard_library
from sternway.pipeline import Pipeline


def train(options: ChaosOptions) -> None:
    """Train from the last checkpoint; what happens is appended to ``notes.jsonl``."""
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    device = take_device(options.device, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    dist.init_process_group(backend_of(device))
    rank = dist.get_rank()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = GPT(vocabulary=256, dim=options.dim, heads=4, layers=options.layers, length=options.length)
    pipe = Pipeline(
        model.to(device),
        schedule="zb-h1",
        n_microbatches=options.microbatches,
        loss_fn=next_byte_loss,
        heartbeat_timeout=30,
        reports=Path(options.folder) / "reports",
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-3)
    found = pipe.resume(Path(options.folder) / "checkpoints", optimizer)
    first = 0 if found is None else found.step
    _note(options, rank == 0, "life", number=life, resumed=first)
    data = batches(standard_library(), 2 * options.microbatches, options.length)
    for step, (x, target) in enumerate(islice(data, first, options.steps), start=first):
        if life < len(options.kills) and options.kills[life] == (step, rank):
            _note(options, True, "kill", step=step, rank=rank)
            pipe.stages[min(pipe.stages)].module.register_forward_pre_hook(_die)
        x, target = x.to(device), target.to(device)
        result = pipe.step(x, target=target, loss_everywhere=True, record=False)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.loss is not None
        _note(options, rank == 0, "step", step=step, loss=float(result.loss))
        if (step + 1) % options.save_every == 0:
            pipe.save(Path(options.folder) / "checkpoints", optimizer, step + 1, keep=2, wait=False)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(pipe))
    _note(options, rank == 0, "done", weights=hashlib.sha256("".join(digests).encode()).hexdigest())
    pipe.close()
    dist.destroy_process_group()


def _die(module: Any, inputs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _digest(pipe: Pipeline) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(pipe.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def _note(options: ChaosOptions, wanted: bool, kind: str, **values: Any) -> None:
    if wanted:
        with open(Path(options.folder) / "notes.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(ChaosOptions.from_json(sys.argv[1]))
