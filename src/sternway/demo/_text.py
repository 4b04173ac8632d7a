"""Text that is on every machine, as bytes to train on: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


def standard_library(limit: int = 2_000_000) -> Tensor:
    """The first ``limit`` bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def batches(text: Tensor, rows: int, length: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of ``rows`` random pieces of ``text`` and, as targets, the same pieces one byte later."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
        pieces = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the predicted next bytes."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
