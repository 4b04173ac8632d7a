"""What tests on small GPUs share: a model, a batch, and blocks that watch a test."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from models import gpt
from torch import Tensor, nn

DIM = 32
CLOSE = {"rtol": 2e-3, "atol": 5e-5}


@contextmanager
def said(rank: int, what: str) -> Iterator[None]:
    """Print how long a part took: a log of a hang says where."""
    start = time.perf_counter()
    try:
        yield
    except BaseException as error:
        sys.stderr.write(f"[rank {rank}] {what}: {type(error).__name__}\n")
        raise
    if rank == 0:
        sys.stderr.write(f"[rank 0] {what}: {time.perf_counter() - start:.2f} s\n")


@contextmanager
def no_waits() -> Iterator[None]:
    """A block in which any wait of the host for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [gpt(DIM, 1, heads=2).cuda() for _ in range(count)]


def batch(rows: int, length: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, DIM, device="cuda"), torch.randn(rows, length, DIM, device="cuda")
