"""Plain attributes that code between the pieces sets: a memory, a count; and buffers that it makes: a table.

Every stage runs that code. On a process of its own each stage has the whole model, and so attributes of its own. Where
stages share a model, as in one process or where a rank has two of them, each must find what it has set itself, and not
what another stage has set, for another microbatch perhaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from sternway._torch.modes import buffers_by_name, put_buffer, take_buffer

_OF_TORCH = frozenset(vars(nn.Module()))
_MISSING: Any = object()

_Name = tuple[int, str, bool]  # a module, a name in it, and whether it is that of a buffer


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

    def values(self) -> list[Any]:
        """What the stages have of their own."""
        return [value for own in (self._first, *self._own.values()) for value in own.values()]

    def taken(self) -> Callable[[], None]:
        """Which values are whose, now; returns a function that makes it so again."""
        first, own, left = dict(self._first), {stage: dict(each) for stage, each in self._own.items()}, self._left

        def put_back() -> None:
            self._first, self._left = dict(first), left
            self._own = {stage: dict(each) for stage, each in own.items()}

        return put_back

    def _all(self) -> dict[_Name, Any]:
        found: dict[_Name, Any] = {}
        for index, module in enumerate(self._modules):
            plain = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
            found |= {(index, name, False): value for name, value in plain.items()}
            found |= {(index, name, True): value for name, value in buffers_by_name(module).items()}
        return found

    def _set(self, name: _Name, value: Any) -> None:
        index, own, is_buffer = name
        module = self._modules[index]
        if value is _MISSING:
            take_buffer(module, own) if is_buffer else vars(module).pop(own, None)
        elif is_buffer:
            put_buffer(module, own, value)
        else:
            vars(module)[own] = value
