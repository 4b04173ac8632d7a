"""Run a function on several real gloo processes, and bring a failure's traceback back."""

from __future__ import annotations

import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def processes() -> Any:
    """A context whose processes are forked from a warm one: torch is imported once, not by every process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.checkpoint", "sternway.pipeline", "hypothesis", "pytest"]
    )
    return context


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out: nobody gets it before it is used."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def join_group(rank: int, world: int, port: int) -> None:
    """Become one of ``world`` gloo ranks, with one thread."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def _rank(
    rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...], errors: Any
) -> None:
    try:
        join_group(rank, world, port)
        torch.manual_seed(0)
        function(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None


def on_ranks(world: int, function: Callable[..., None], *arguments: Any, timeout: float = 600) -> None:
    """Call ``function(rank, *arguments)`` on ``world`` processes; raise the first rank's error, if any."""
    context = processes()
    errors = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, function, arguments, errors)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout)
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
    texts = []
    while not errors.empty():
        rank, text = errors.get()
        texts.append(f"rank {rank}:\n{text}")
    assert not texts, "\n".join(texts)
    assert not hung, f"{len(hung)} of {world} ranks did not finish within {timeout} s"
    assert all(process.exitcode == 0 for process in ranks)
