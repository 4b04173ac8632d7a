"""Random numbers of a step that depend on the seed, the step, the microbatch and the stage, and on nothing else.

Dropout then leaves out the same elements under every schedule, however the stages are spread over ranks, and when a
step is run once more. The seed is the one of the first rank, as ``torch.manual_seed`` set it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def step_seed(step: int) -> int:
    """The seed of a step, given this process's."""
    return _mixed(torch.initial_seed() % 2**64, step)


def seed_forward(seed: int, stage: int, microbatch: int, device: torch.device) -> None:
    """Begin with the random numbers of one F."""
    for generator in _generators(device):
        generator.manual_seed(_mixed(seed, stage, microbatch))


def python_seed(seed: int, microbatch: int) -> int:
    """The seed of what Python and numpy draw between the modules of a whole model, in every stage of a microbatch."""
    return _mixed(seed, microbatch)


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """A block after which the generators are as they were before."""
    generators = _generators(device)
    before = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def _mixed(*numbers: int) -> int:
    """A number of 63 bits."""
    content = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
