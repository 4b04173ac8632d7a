"""Following a forward: which values come out of the model's work, and how are they named so that all ranks agree?

    forward     embed ── glue ── block 0 ── glue ── block 1 ── glue ── head ── glue
    segments  0 └──── 1 ───────┘└───── 2 ─────────┘└───── 3 ─────────┘└──── 4 ─────┘

The *pieces* are modules; between their calls runs *glue*, the rest of the model's code. A segment is one call of a
piece and the glue that follows it. A value *depends* on the model's work if it comes from a piece, a parameter or a
random number. Its *key* is the segment, the function that made it, how often that was called in the segment before, and
the place in what it returned. Glue that depends on nothing but the batch (masks, positions) has no keys: it runs on
every rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from sternway._torch.modes import (
    WHOLE_CALL,
    computes_weights,
    has_backward_hooks,
    is_compiled,
    is_innermost,
    parameter_places,
    whole_call,
)
from sternway._torch.tensors import storage_id
from sternway.errors import PipelineError
from sternway.pipeline.forward._absent import Absent, tensors_in
from sternway.pipeline.forward._names import FROM_PYTHON, LOOKS, RANDOM, READS, function_name, python_random_state

Key = tuple[int, str, int, int]
"""Names a value: segment, function (empty for the piece), number of that call in the segment, place in the result.

A place below 0 stands for an argument that the function changed: -1 for the first.
"""

PIECE = ""


class Follower(TorchFunctionMode):
    """A function mode that sees the glue of one forward, and is told of the calls of pieces."""

    def __init__(self, kept: Mapping[int, Tensor], *, looks_at_python: bool = True) -> None:
        super().__init__()
        self.segment = 0
        # What Python has drawn until now; if it is not looked at, any tensor made of what Python has may be random.
        self._python = python_random_state() if looks_at_python else None
        self._aside = False  # inside a piece
        # Buffers inside pieces, by id; parameters are known by their type. They are held: a piece may put another one
        # there, and what glue makes then must not get the id of the old one.
        self._kept = kept
        self._counts: Counter[str] = Counter()
        self._keys: dict[int, tuple[weakref.ref[Tensor], Key]] = {}
        self._written: dict[int, torch.UntypedStorage] = {}  # storages that glue changed with what depends

    # What a subclass does

    def free(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Glue that depends on nothing but the batch."""
        return function(*args, **kwargs)

    def read(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Glue that brings a value into Python."""
        return function(*args, **kwargs)

    def glue(self, key: Key, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Glue that depends on the model's work."""
        raise NotImplementedError

    # What torch calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if self._aside or name in LOOKS:
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        drawn = name in RANDOM or (name in FROM_PYTHON and python_random_state() != self._python)
        if not drawn and not any(map(self.depends, tensors)):
            return self.free(func, args, kwargs)
        if name in READS:
            return self.read(func, args, kwargs, tensors)
        number = self._counts[name]
        self._counts[name] += 1
        return self.glue((self.segment, name, number, 0), func, args, kwargs, tensors)

    # Keys

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the model's work."""
        return (
            isinstance(tensor, Absent | nn.Parameter)
            or id(tensor) in self._kept
            or self.key_of(tensor) is not None
            or tensor.requires_grad
            or bool(self._written and _has_storage(tensor) and storage_id(tensor) in self._written)
        )

    def key_of(self, tensor: Tensor) -> Key | None:
        """The key of a value, or None if it has none."""
        found = self._keys.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def name_value(self, tensor: Tensor, key: Key) -> None:
        """Give a value its key; a value that was changed gets a new one."""
        self._keys[id(tensor)] = weakref.ref(tensor), key

    def name_written(self, tensor: Tensor) -> None:
        """Glue changed this tensor: whatever shares its memory depends on the model's work now."""
        if _has_storage(tensor):
            self._written[storage_id(tensor)] = tensor.untyped_storage()

    def next_segment(self) -> None:
        """A piece is called."""
        self.segment += 1
        self._counts.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A block that runs without this mode, as fast as ever."""
        outside = is_innermost(self)  # if not, another mode was entered in the forward, and this one stays under it
        if outside:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            if outside:
                self.__enter__()  # type: ignore[no-untyped-call]  # torch's


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided


PieceCall = Callable[[str, Callable[..., Any], Any, Any], Any]
"""What is called in place of a piece's forward: with its name, that forward, and the arguments."""


class Interceptor:
    """Passes the calls of some pieces to something else, for the length of a block. Made once, it is used often.

    The pieces' forwards are replaced; hooks of the modules run as always. The hooks of modules on a device mesh are a
    part of them: they make DTensors of what goes in, and shards of what comes out. So are those of a module that is
    compiled by ``module.compile()``, and of one with hooks for gradients, which torch puts on what goes in and comes
    out: what is sent is what other modules get. So are those that compute a weight, as
    ``torch.nn.utils.spectral_norm`` does.
    """

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        self._given = pieces
        self._pieces = [_Piece(name, module) for name, module in pieces.items()]

    def __reduce__(self) -> Any:  # a stand-in of the copied module would pass the calls of its copy to the wrong one
        return Interceptor, (self._given,)

    @contextmanager
    def passing_to(self, call: PieceCall) -> Iterator[list[str]]:
        """A block in which the pieces' calls go to ``call``; afterwards, the pieces that had replaced their forward."""
        put_back, replaced = [piece.replace(call) for piece in self._pieces], list[str]()
        try:
            yield replaced
        finally:
            replaced += [piece.name for piece, each in zip(self._pieces, put_back, strict=True) if not each()]


def check_replaced(names: list[str]) -> None:
    """Raise if pieces have replaced their forward: nobody is told of their next calls."""
    if names:
        raise PipelineError(
            "a module of a stage must not replace its own forward while it runs",
            got=f"{names[0]} has another one after it",
            fix="replace it before the pipeline is built, or between steps",
        )


class _Piece:
    """A piece, and the last stand-in for its forward."""

    __slots__ = ("_calls", "_forward", "_module", "_parameters", "_stand_in", "name")

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self._module, self._parameters = name, module, parameter_places(module)
        self._forward: Callable[..., Any] | None = None

    def replace(self, call: PieceCall) -> Callable[[], bool]:
        """Let the piece's calls go to ``call``; returns what ends that, and says whether it lasted until then."""
        module, whole = self._module, self._runs_whole()
        forward = whole_call(module) if whole else module.forward
        if not _is_same(self._forward, forward):
            self._forward, self._calls = forward, list[PieceCall]()
            self._stand_in = _stand_in(self.name, forward, self._calls)
        own, place, calls = vars(module), WHOLE_CALL if whole else "forward", self._calls
        before, stand_in = own.get(place), self._stand_in
        own[place] = stand_in  # into the dict itself: a module looks at each attribute that is set
        calls.append(call)

        def put_back() -> bool:
            calls.pop()
            is_there = own.pop(place, None) is stand_in
            if before is not None:
                own[place] = before
            return is_there

        return put_back

    def _runs_whole(self) -> bool:
        module = self._module
        if is_compiled(module) or has_backward_hooks(module) or computes_weights(module):
            return True
        kinds = {type(parameter) for own in self._parameters for parameter in own.values()}
        return any(issubclass(kind, DTensor) for kind in kinds)


def _is_same(one: Any, other: Any) -> bool:
    """Whether these are one function. A bound method is made each time anew; others may be equal to anything."""
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other


def _stand_in(name: str, forward: Callable[..., Any], calls: list[PieceCall]) -> Callable[..., Any]:
    """A forward that passes its calls to the last of ``calls``."""

    @wraps(forward)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return calls[-1](name, forward, args, kwargs)

    return stand_in
