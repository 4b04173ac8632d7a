"""The states of the random number generators, as values that ``torch.load(weights_only=True)`` can read.

Those of Python, torch, the current CUDA device, and numpy if it is imported.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any

import torch

from sternway.errors import CheckpointError


def uses_cuda() -> bool:
    """Whether this process uses a CUDA device."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's


def take() -> dict[str, Any]:
    """The state of every generator."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": torch.tensor(numbers), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if uses_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "keys": torch.from_numpy(keys.astype("int64")),
            "rest": (int(place), int(has_gauss), float(cached)),
        }
    return state


def give(state: dict[str, Any]) -> None:
    """Set the generators that ``state`` has."""
    try:
        python = state["python"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
            saved = state["numpy"]
            numpy.random.set_state((saved["kind"], saved["keys"].numpy().astype("uint32"), *saved["rest"]))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            "the checkpoint's generator states cannot be used",
            got=f"{type(error).__name__}: {error}",
            fix="remove that checkpoint",
        ) from None


def give_one_of(states: list[dict[str, Any]], rank: int, size: int) -> None:
    """Set the generators of process ``rank`` of ``size``, given the states of the processes that saved.

    With as many processes as before, each gets its own. With another number: if all drew the same numbers, they still
    do; if not, additional processes get seeds of their own.
    """
    give(states[rank % len(states)])
    alike = all(torch.equal(state["torch"], states[0]["torch"]) for state in states)
    if size != len(states) and not alike and rank >= len(states):
        seed = zlib.crc32(states[rank % len(states)]["torch"].numpy().tobytes()) + rank
        random.seed(seed)
        torch.manual_seed(seed)
