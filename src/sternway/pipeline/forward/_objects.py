"""Python objects that a module is called with, and may change: a list that it appends to, a counter, a cache.

What a module changes in one stage, no other stage sees; and what it changes again when it runs again is changed twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, final

from torch import Tensor, nn

from sternway._tree import CONSTANT, children

_DEPTH = 5
_OPAQUE = (Tensor, nn.Module, FunctionType, ModuleType, type)
_END: Any = object()


@final
class GivenObjects:
    """The objects among the arguments of a call, as they are now.

    Example:
        >>> losses = []
        >>> given = GivenObjects((3, losses), {})
        >>> losses.append(0.5)
        >>> type(given.changed()).__name__
        'list'
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        self._objects = [value for value in values if not isinstance(value, (*_OPAQUE, *CONSTANT))]
        self._before = [list(_parts(value, _DEPTH)) for value in self._objects]

    def changed(self) -> Any:
        """The first one that has changed since; None if there is none. What is in tensors does not count."""
        for value, before in zip(self._objects, self._before, strict=True):
            now = list(_parts(value, _DEPTH))
            if len(now) != len(before) or not all(map(_same, now, before)):
                return value
        return None


def _parts(value: Any, depth: int) -> Iterator[Any]:
    """An object and what is in it, in order."""
    yield value if isinstance(value, CONSTANT) else (value,)
    if not depth or isinstance(value, (*_OPAQUE, *CONSTANT)):
        return
    inside = children(value)
    if inside is None:
        named = getattr(value, "__dict__", {}).items()
        inside = [("", part) for part in value] if isinstance(value, set | frozenset | deque) else list(named)
    for name, part in inside:
        yield name
        yield from _parts(part, depth - 1)
    yield _END


def _same(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return one[0] is other[0]
    return type(one) is type(other) and (one is other or bool(one == other))


def is_cache(value: Any) -> bool:
    """Whether an object is a cache of transformers: each layer has its own part of it, and reads no other."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)
