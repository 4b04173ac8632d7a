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


@contextmanager
def python_unchanged() -> Iterator[None]:
    """A block after which Python and numpy go on drawing as if it had not been."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextmanager
def python_seeded(seed: int) -> Iterator[None]:
    """A block in which Python and numpy draw from ``seed``; afterwards they go on as if it had not been."""
    with python_unchanged():
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        yield
