"""Random numbers of Python and numpy that code between the pieces draws, as ``lam = random.random()``.

Every stage runs that code, and must draw the same: a number may be used in several stages, and nobody sees Python's
numbers. So for a model whose code between the pieces draws some, each forward begins with a seed that all stages of a
microbatch have in common. A piece runs in one stage only, and so draws from a seed of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from sternway.pipeline.forward._names import python_random_state


@final
class PythonRandom:
    """Where Python and numpy are now with their random numbers."""

    def __init__(self) -> None:
        self._state = python_random_state()

    def has_drawn(self) -> bool:
        """Whether any were drawn since."""
        return self._state != python_random_state()

    def put_back(self) -> None:
        """Go on drawing from there."""
        python, *of_numpy = self._state
        random.setstate(python)
        if of_numpy:
            numpy = sys.modules["numpy"]
            kind, keys, *rest = of_numpy
            numpy.random.set_state((kind, numpy.frombuffer(keys, dtype="uint32"), *rest))


@contextmanager
def python_unchanged() -> Iterator[None]:
    """A block after which Python and numpy go on drawing as if it had not been."""
    before = PythonRandom()
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def python_seeded(seed: int) -> Iterator[None]:
    """A block in which Python and numpy draw from ``seed``; afterwards they go on as if it had not been."""
    with python_unchanged():
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        yield
