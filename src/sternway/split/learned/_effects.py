"""What a backward has changed beside computing gradients, as far as that can be seen.

A backward that is tried is called more than once. One that counts its calls, adds to a buffer, or draws random numbers
would leave something else behind than after one call. Two things notice it:

- ``Surroundings`` compares before and after: the tensors of the call and what hangs on them (``weight.main_grad``), by
  their versions and by a sum over their bits, since kernels of one's own change no version; the objects on ``ctx``
  (which names are on it does not matter: each part has a ``ctx`` of its own); the Function's own attributes; the global
  variables and the closure that the code of its backward names; the random generators.
- ``guarded`` stops an operation before it writes to a tensor that was there before the call, draws a random number, or
  talks to another process.

What cannot be seen: what a kernel of one's own writes to memory that no tensor of the call leads to, and what Python
code changes further away than that.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from sternway._storage import dense_parts, storage_sizes, tensors_in
from sternway._torch.functions import backward_of
from sternway._torch.saved_hooks import intercept, written_arguments
from sternway._torch.tensors import version_of
from sternway.split.learned._call import BackwardCall

_DEPTH = 3
_LIBRARIES = {"torch", "numpy", "math", "builtins", "functools", "typing"}  # nobody counts calls there
_PROCESSES = {"c10d", "_c10d_functional", "c10d_functional", "symm_mem"}  # namespaces of operators
_HARMLESS = {"aten::record_stream"}


class SideEffectError(Exception):
    """A backward was about to do something that is seen outside of it."""


@contextmanager
def guarded() -> Iterator[None]:
    """A block in which an operation that has an effect outside of the block raises SideEffectError, and has none."""
    made: set[int] = set()

    def look(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = operator.name() if hasattr(operator, "name") else str(operator)
        if name.split("::")[0] in _PROCESSES:
            raise SideEffectError(f"talks to other processes ({name})")
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise SideEffectError(f"draws random numbers ({name})")
        given = storage_sizes(tensors_in([*args, kwargs])).keys()
        if name not in _HARMLESS:
            for position, key in written_arguments(operator):
                target = args[position] if position < len(args) else kwargs.get(key)
                if not storage_sizes(tensors_in(target)).keys() <= made:
                    raise SideEffectError(f"writes to a tensor that it has not made ({name})")
        returned = operator(*args, **kwargs)
        made.update(storage_sizes(tensors_in(returned)).keys() - given)
        return returned

    with intercept(look):
        yield


class Surroundings:
    """What is around a call of a backward, before it."""

    def __init__(self, call: BackwardCall) -> None:
        self._call = call
        self._held: list[Any] = []  # what was looked at: something new must not have its identity
        self._state = self._picture()
        found = _reached([*call.tensors(), *(each for each in self._held if isinstance(each, Tensor))])
        self._tensors = list(found.values())
        self._bits = [_bits(tensor) for tensor in self._tensors]
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._random, self._others = RandomState(call.device), _other_generators()

    def change(self) -> str | None:
        """What the backward has changed of tensors and generators since; None if nothing was seen."""
        if self._versions != [version_of(tensor) for tensor in self._tensors]:
            return "changes tensors in place"
        if self._bits != [_bits(tensor) for tensor in self._tensors]:
            return "changes tensors in place, by a kernel that autograd does not see"
        if self._random.was_used() or (is_alone() and self._others != _other_generators()):
            return "draws random numbers"
        return None

    def change_of_state(self) -> str | None:
        """What the backward has changed of Python's objects since; None if nothing was seen."""
        after = self._picture()
        changed = [name for name in {**self._state, **after} if self._state.get(name) != after.get(name)]
        return f"changes {', '.join(sorted(changed)[:3])}" if changed else None

    def restore_random(self) -> None:
        """Let torch draw the random numbers that it would have drawn then."""
        self._random.restore()

    def _picture(self) -> dict[str, Any]:
        function, found = self._call.function, {f"ctx.{name}": each for name, each in self._call.attributes.items()}
        found["ctx.saved_tensors"] = self._call.saved
        for base in function.__mro__:
            if base.__module__.split(".")[0] not in _LIBRARIES:
                found |= {f"{base.__name__}.{name}": value for name, value in vars(base).items()}
        found |= named_by(backward_of(function))
        return {name: outline(value, self._held) for name, value in found.items()}


def is_alone() -> bool:
    """Whether no other thread runs Python, which might draw random numbers too."""
    return threading.active_count() == 1


class RandomState:
    """The random generators of torch, of the CPU and of one device, as they are now."""

    def __init__(self, device: torch.device | None) -> None:
        is_cuda = device is not None and device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self._device = device if is_cuda else None
        self._states = self._now()

    def _now(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self._device)] if self._device is not None else [])]

    def was_used(self) -> bool:
        """Whether random numbers were drawn since. While other threads run, it might have been them: then False."""
        return is_alone() and not all(map(torch.equal, self._states, self._now()))

    def restore(self) -> None:
        """Let the same numbers be drawn again, where they were drawn by this thread."""
        if self.was_used():
            torch.set_rng_state(self._states[0])
            if self._device is not None:
                torch.cuda.set_rng_state(self._states[1], self._device)


def _other_generators() -> list[Any]:
    """The states of Python's and numpy's generators."""
    numpy = sys.modules.get("numpy")
    return [random.getstate(), repr(numpy.random.get_state(legacy=False)) if numpy is not None else ""]


def outline(value: Any, held: list[Any], depth: int = _DEPTH) -> Any:
    """A value as something that differs once it is changed: plain values, what containers hold, identities.

    What is known by its identity is put in ``held``.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    held.append(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value), outline(value.grad if value.is_leaf else None, held)
    if depth and isinstance(value, Mapping):
        return id(value), [(outline(key, held, 0), outline(each, held, depth - 1)) for key, each in value.items()]
    if depth and isinstance(value, list | tuple | bytearray):
        return id(value), [outline(each, held, depth - 1) for each in value]
    if depth and isinstance(value, AbstractSet):
        return id(value), sorted(id(each) for each in value)
    if depth and hasattr(value, "__dict__") and not isinstance(value, ModuleType | FunctionType):
        return id(value), [(name, outline(each, held, depth - 1)) for name, each in vars(value).items()]
    return id(value)


def named_by(function: Any, depth: int = _DEPTH) -> dict[str, Any]:
    """The global variables and the variables around a function that its code names, by name; also of what it calls."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return {}
    names = set(_names(function.__code__))
    around = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            around[name] = cell.cell_contents
    found: dict[str, Any] = {}
    for name, value in around.items():
        if isinstance(value, ModuleType):
            if value.__name__.split(".")[0] not in _LIBRARIES:
                found |= {f"{name}.{each}": vars(value)[each] for each in names if each in vars(value)}
        elif (getattr(value, "__module__", None) or "").split(".")[0] not in _LIBRARIES:
            found[name] = value
            if depth and isinstance(value, FunctionType):
                found = named_by(value, depth - 1) | found
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _reached(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Tensors, and those that are attributes of one, such as ``.grad``; by identity."""
    found = {id(tensor): tensor for tensor in tensors}
    for tensor in tensors:
        named = tensors_in(dict(getattr(tensor, "__dict__", {})))
        grad = tensor.grad if tensor.is_leaf else None
        found.update({id(each): each for each in (*named, *([] if grad is None else [grad]))})
    return found


def _bits(tensor: Tensor) -> list[int]:
    """A sum over the bits of a tensor, for each of the tensors that hold its elements."""
    with torch.no_grad():
        return [_sum_of(part.detach().reshape(-1)) for part in dense_parts(tensor) if part.numel()]


def _sum_of(flat: Tensor) -> int:
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return int(flat.resolve_neg().view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
