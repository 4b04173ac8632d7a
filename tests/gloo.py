"""Run a function on several real gloo processes, and bring a failure's traceback back."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(
    rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...], errors: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        torch.manual_seed(0)
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None


def on_ranks(world: int, function: Callable[..., None], *arguments: Any, timeout: float = 120) -> None:
    """Call ``function(rank, *arguments)`` on ``world`` processes; raise the first rank's error, if any."""
    context = mp.get_context("spawn")
    errors = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, world, port, function, arguments, errors)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    texts = []
    while not errors.empty():
        rank, text = errors.get()
        texts.append(f"rank {rank}:\n{text}")
    assert not texts, "\n".join(texts)
    assert not hung, f"{len(hung)} of {world} ranks did not finish within {timeout} s"
    assert all(process.exitcode == 0 for process in processes)
