"""Run a function on several real gloo processes, and bring a failure's traceback back."""

from __future__ import annotations

import gc
import multiprocessing.connection
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
"""The release: 2, 13."""
GRACE = 30.0
"""So many seconds have the other ranks after one has failed."""


PRELOADED = ["torch", "torch.distributed.checkpoint", "sternway.pipeline", "hypothesis", "pytest"]
"""What the warm process imports. Tests that need more append to it before the first process starts."""
if torch.version.cuda is None:  # to ask for a GPU, as Dynamo does, is to fix the process's share of it
    PRELOADED.append("torch._dynamo")  # every optimizer imports it, for most of a second


def processes() -> Any:
    """A context whose processes are forked from a warm one: torch is imported once, not by every process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def warm_up() -> None:
    """Start the warm process, for code that has a list of its own of what to import: the first one counts."""
    processes()
    forkserver.ensure_running()


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
    rank: int,
    world: int,
    port: int,
    join: Callable[[int, int, int], None],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    errors: Any,
) -> None:
    gc.freeze()  # what the warm process had: nothing of it is garbage, and there is much of it
    try:
        join(rank, world, port)
        torch.manual_seed(0)
        function(rank, *arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        errors.put((rank, traceback.format_exc()))
        raise SystemExit(1) from None


def heard_from(ranks: int, target: Callable[..., None], *arguments: Any, victim: int, limit: float) -> dict[int, Any]:
    """What ranks put into a queue, by rank, when all but the victim have ended; then that one is ended, too.

    Each is called with its number, how many there are, a port, the victim's number, the arguments and the queue.
    """
    context = processes()
    said, port = context.SimpleQueue(), free_port()
    started = [
        context.Process(target=target, args=(rank, ranks, port, victim, *arguments, said)) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        for rank, process in enumerate(started):
            if rank != victim:
                process.join(limit)
                assert not process.is_alive(), f"rank {rank} hangs"
    finally:
        for process in started:
            process.kill()
            process.join()
    heard = {}
    while not said.empty():
        rank, *words = said.get()
        heard[rank] = words
    return heard


def on_ranks(
    world: int,
    function: Callable[..., None],
    *arguments: Any,
    timeout: float = 600,
    join: Callable[[int, int, int], None] = join_group,
) -> None:
    """Call ``function(rank, *arguments)`` on ``world`` processes; raise the first rank's error, if any.

    Each process first calls ``join(rank, world, port)``.
    """
    context = processes()
    errors = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, join, function, arguments, errors))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + timeout
    # Asked once: if the last one ended between two questions, nobody would be left to wait for.
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < end:
        multiprocessing.connection.wait([process.sentinel for process in alive], max(0.0, end - time.monotonic()))
        if any(process.exitcode for process in ranks):  # the others may wait for that one
            end = min(end, time.monotonic() + GRACE)
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
