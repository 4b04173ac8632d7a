"""Plain attributes that code between the pieces sets: a memory, a count; and buffers that it makes: a table.

Every stage runs that code. On a process of its own each stage has the whole model, and so attributes of its own. Where
stages share a model, as in one process or where a rank has two of them, each must find what it has set itself, and not
what another stage has set, for another microbatch perhaps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

from torch import nn

from sternway._torch.modes import buffers_by_name, hooks_since, next_hook, put_buffer, take_buffer

_OF_TORCH = frozenset(vars(nn.Module()))


class _Missing:
    """Stands for no value; a class, which copies and pickles are the same as."""


_MISSING: Any = _Missing

_Name = tuple[int, str, bool]  # a module, a name in it, and whether it is that of a buffer


@final
class OwnAttributes:
    """The plain attributes of some modules, of which each stage has its own.

    Args:
        modules: those outside of pieces.
        model: the whole model. What is set when its modules get hooks is for all stages, as these hooks are.
    """

    def __init__(self, modules: Sequence[nn.Module], model: nn.Module) -> None:
        self._modules, self._model = modules, model
        self._first: dict[_Name, Any] = {}  # what they were before a stage set them
        self._own: dict[int, dict[_Name, Any]] = {}
        self._left: dict[_Name, Any] = {}  # what they were after the last run of a stage

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """A block in which the attributes are those of a stage. What it sets becomes its own."""
        own = self._own.setdefault(stage, {})
        for name in list(self._first):
            if self._value(name) is self._left.get(name, _MISSING):
                self._set(name, own.get(name, self._first[name]))
            else:  # somebody else has set it, between two steps
                self._share([name])
        before, first_hook = [dict(place) for place in self._places()], next_hook()
        try:
            yield
        finally:
            changes = list(self._changes(before))
            if changes and hooks_since(self._model.modules(), first_hook):
                self._share([name for name, _, _ in changes])
                changes = []
            for name, old, new in changes:
                self._first.setdefault(name, old)
                own[name] = new
            self._left = {name: self._value(name) for name in self._first}

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

    def _share(self, names: list[_Name]) -> None:
        """Let what these are now be for all stages."""
        for each in (self._first, *self._own.values()):
            for name in names:
                each.pop(name, None)

    def _places(self) -> Iterator[dict[str, Any]]:
        """Of each module, its attributes, then its buffers."""
        for module in self._modules:
            yield vars(module)
            yield buffers_by_name(module)

    def _changes(self, before: list[dict[str, Any]]) -> Iterator[tuple[_Name, Any, Any]]:
        """What is not as it was before: its name, what it was, and what it is."""
        for number, (old, new) in enumerate(zip(before, self._places(), strict=True)):
            if list(old) == list(new) and all(map(operator.is_, old.values(), new.values())):
                continue
            for name in old.keys() | new.keys():
                pair = old.get(name, _MISSING), new.get(name, _MISSING)
                if pair[0] is not pair[1] and (number % 2 or name not in _OF_TORCH):
                    yield (number // 2, name, bool(number % 2)), *pair

    def _value(self, name: _Name) -> Any:
        index, own, is_buffer = name
        module = self._modules[index]
        return (buffers_by_name(module) if is_buffer else vars(module)).get(own, _MISSING)

    def _set(self, name: _Name, value: Any) -> None:
        index, own, is_buffer = name
        module = self._modules[index]
        if value is _MISSING:
            take_buffer(module, own) if is_buffer else vars(module).pop(own, None)
        elif is_buffer:
            put_buffer(module, own, value)
        else:
            vars(module)[own] = value
