"""Tensors that another stage has.

A stage runs the whole forward, but computes only its own part. Where the forward uses a value of an earlier stage that
is of no concern here, an ``Absent`` stands for it: it has a shape, a dtype and a device, and cannot be computed with.
So a value that should have been received, and was not, is an error and never a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sternway._torch.modes import shell, without_subclasses
from sternway._tree import TensorIndex, leaves, replace_leaves
from sternway.errors import PipelineError
from sternway.pipeline.forward._names import LOOKS, function_name, user_line


class Like(NamedTuple):
    """What is known of a tensor that is not here."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


class Absent(Tensor):
    """A tensor of another stage: its shape, dtype and device, without memory."""

    @staticmethod
    def __new__(cls, like: Like, device: torch.device) -> Absent:
        place = device if device.type == like.device else torch.device(like.device)
        floats = like.requires_grad and (like.dtype.is_floating_point or like.dtype.is_complex)
        made: Absent = shell(cls, like.shape, like.dtype, place, floats)
        return made

    def __init__(self, like: Like, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch gives it no types
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_name(func) in LOOKS - {"data_ptr"}:
            with without_subclasses():
                return func(*args, **(kwargs or {}))
        raise not_here(function_name(func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise not_here(str(func))


def not_here(what: str) -> PipelineError:
    """The error when this stage's own work uses a value that no stage sent to it."""
    return PipelineError(
        "a stage uses a value of an earlier stage that was not sent to it, because the forward did not use it there "
        "when it was first run",
        got=f"{what} at {user_line()}",
        fix="pass a sample= that takes the same way through the forward, or cut elsewhere",
    )


class Unsent:
    """Stands for an object of an earlier stage that is no tensor, number or text. To use it is an error."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unsent) and other.kind == self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise PipelineError(
            "an object that a module returns in one stage cannot be used in another",
            got=f".{name} of a {self.kind} at {user_line()}",
            fix="return tensors, numbers and text, in tuples, lists, dicts and dataclasses",
        )


class Noted(NamedTuple):
    """What one call in the forward returned: enough to return something like it on another rank.

    Attributes:
        name: of the function or module.
        tree: what it returned, with a ``TensorIndex`` for each tensor.
        tensors: each of these tensors, or the position among the arguments of the one that it is.
        written: the positions of arguments that it changed in place.
    """

    name: str
    tree: Any
    tensors: tuple[Like | int, ...]
    written: tuple[int, ...]

    @property
    def looks_at_arguments(self) -> bool:
        """Whether the call changed arguments, or returned some."""
        return bool(self.written) or any(type(each) is int for each in self.tensors)

    def again(self, arguments: list[Tensor], arrived: dict[int, Tensor], device: torch.device) -> Any:
        """What the call returns here: tensors that arrived, arguments of the call, and for the rest ``Absent`` ones."""

        def leaf(value: Any) -> Any:
            if not isinstance(value, TensorIndex):
                return value
            if value.index in arrived:
                return arrived[value.index]
            found = self.tensors[value.index]
            return Absent(found, device) if isinstance(found, Like) else arguments[found]

        return leaf(self.tree) if type(self.tree) is TensorIndex else replace_leaves(leaf, self.tree)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice, type(...))
_PLAIN_KINDS = frozenset(_PLAIN)


def note(name: str, result: Any, arguments: list[Tensor], written: tuple[int, ...] = ()) -> tuple[Noted, list[Tensor]]:
    """Describe what a call returned; also the tensors in it, in order."""
    positions = {id(tensor): position for position, tensor in enumerate(arguments)}
    found = tensors_in(result)
    places = {id(tensor): place for place, tensor in enumerate(found)}

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorIndex(places[id(value)])
        return value if isinstance(value, _PLAIN) else Unsent(type(value).__name__)

    tree = replace_leaves(leaf, result)
    return Noted(name, tree, tuple(positions.get(id(t), like(t)) for t in found), written), found


def like(tensor: Tensor) -> Like:
    """What other ranks are told of a tensor."""
    return Like(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)


def tensors_in(*trees: Any) -> list[Tensor]:
    """The tensors in what a call is given or returns, each once."""
    found: dict[int, Tensor] = {}
    _gather(trees, found)
    return list(found.values())


def _gather(parts: Iterable[Any], found: dict[int, Tensor]) -> None:
    for part in parts:
        kind = type(part)
        if isinstance(part, Tensor):
            found[id(part)] = part
        elif kind is tuple or kind is list:
            _gather(part, found)
        elif kind is dict:
            _gather(part.values(), found)
        elif kind not in _PLAIN_KINDS:
            found |= {id(leaf): leaf for leaf in leaves(part) if isinstance(leaf, Tensor)}
