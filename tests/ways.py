"""The ways to run a function that has hooks in it: as it is, and compiled by each backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo

HAS_STERNWAY = "sternway" in torch._dynamo.list_backends(exclude_tags=())
COMPILED = ["aot_eager", *(["sternway"] if HAS_STERNWAY else [])]
WAYS = ["plain", *COMPILED]
EVERY = [*WAYS, "inductor", *(["sternway+inductor"] if HAS_STERNWAY else [])]


def run(fn: Callable[..., Any], way: str, **options: Any) -> Any:
    """``fn`` in this way, in one graph."""
    if way == "plain":
        return fn
    backend, _, inner = way.partition("+")
    if backend == "sternway":
        options["options"] = {"inner": inner or "eager"}
    return torch.compile(fn, backend=backend, fullgraph=True, **options)


@contextmanager
def no_recompile() -> Iterator[None]:
    """Compile once; a second time is an error."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
