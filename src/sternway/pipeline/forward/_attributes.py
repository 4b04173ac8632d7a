"""Plain attributes that code between the pieces sets: a memory, a count.

Every stage runs that code. On a process of its own each stage has the whole model, and so attributes of its own. Where
stages share a model, as in one process or where a rank has two of them, each must find what it has set itself, and not
what another stage has set, for another microbatch perhaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING: Any = object()

_Name = tuple[int, str]


@final
class OwnAttributes:
    """The plain attributes of some modules, of which each stage has its own.

    Args:
        modules: those outside of pieces.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._first: dict[_Name, Any] = {}  # what they were before a stage set them
        self._own: dict[int, dict[_Name, Any]] = {}
        self._left: dict[_Name, Any] = {}  # what they were after the last run of a stage

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A block in which the attributes are those of a stage. What it sets becomes its own."""
        own = self._own.setdefault(stage, {})
        now = self._all()
        for name in list(self._first):
            if now.get(name, _MISSING) is self._left.get(name, _MISSING):
                self._set(name, own.get(name, self._first[name]))
            else:  # somebody else has set it, between two steps: that is for all stages
                for each in (self._first, *self._own.values()):
                    each.pop(name, None)
        before = self._all()
        try:
            yield
        finally:
            after = self._all()
            for name in before.keys() | after.keys():
                value = after.get(name, _MISSING)
                if value is not before.get(name, _MISSING):
                    self._first.setdefault(name, before.get(name, _MISSING))
                    own[name] = value
            self._left = {name: after.get(name, _MISSING) for name in self._first}

    def _all(self) -> dict[_Name, Any]:
        return {
            (index, name): value
            for index, module in enumerate(self._modules)
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }

    def _set(self, name: _Name, value: Any) -> None:
        held = vars(self._modules[name[0]])
        if value is _MISSING:
            held.pop(name[1], None)
        else:
            held[name[1]] = value
