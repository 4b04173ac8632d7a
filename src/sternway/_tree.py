"""Nested containers: tuples, named tuples, lists, dicts and dataclasses with tensors at the leaves.

torch's own pytree takes a dataclass for a leaf unless it was registered; ours looks inside, since a stage's outputs
are often one. Anything that is not a container is a leaf, tensors and ``None`` included.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container with the words that lead to them, or None for a leaf."""
    if isinstance(tree, Tensor | GradientEdge):  # an edge is a named tuple, but one place in a graph
        return None
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple | list):
        return [(f"[{index}]", value) for index, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        return [(f".{name}", getattr(tree, name)) for name in fields]
    return None


_LEAVES = (Tensor, type(None), int, float, bool, str)  # the usual ones, known by their type alone


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, left to right."""
    found: list[Any] = []
    _gather(tree, found)
    return iter(found)


def _gather(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES:
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _gather(part, found)
    elif kind is dict:
        for part in tree.values():
            _gather(part, found)
    else:
        parts = children(tree)
        if parts is None:
            found.append(tree)
        for _, part in parts or ():
            _gather(part, found)


def replace_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape, with ``function(leaf)`` in place of each leaf."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        return kind([replace_leaves(function, part) for part in tree])
    if kind is dict:
        return {key: replace_leaves(function, part) for key, part in tree.items()}
    parts = children(tree)
    if parts is None:
        return function(tree)
    values = [replace_leaves(function, part) for _, part in parts]
    if isinstance(tree, tuple):
        return _tuple_like(tree, values)
    if isinstance(tree, list):
        return values
    if isinstance(tree, Mapping):
        return _mapping_like(tree, values)
    twin = copy.copy(tree)  # not dataclasses.replace: it would run __post_init__ on gradients
    for (step, _), value in zip(parts, values, strict=True):
        object.__setattr__(twin, step.removeprefix("."), value)
    return twin


def _tuple_like(tree: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    if hasattr(tree, "_make"):
        return type(tree)._make(values)  # type: ignore[no-any-return]  # a named tuple
    if hasattr(tree, "n_fields"):  # what torch.max and torch.topk return
        return type(tree)(values)
    return tuple(values)


def _mapping_like(tree: Mapping[Any, Any], values: list[Any]) -> Mapping[Any, Any]:
    """A mapping of the same kind, such as transformers' ModelOutput, whose items are attributes too."""
    new = dict(zip(tree, values, strict=True))
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return new
    twin = copy.copy(tree)
    for key, value in new.items():
        twin[key] = value
    return twin


class TensorIndex:
    """Stands in a tree for the n-th tensor. Not a dataclass: those are containers here."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorIndex) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)

    def __repr__(self) -> str:
        return f"TensorIndex({self.index})"


CONSTANT = (type(None), bool, int, float, str, TensorIndex)
"""Types of values that are known by comparing them."""


def take_tensors(tree: Any) -> tuple[Any, list[Tensor]]:
    """A tree with a ``TensorIndex`` in place of each tensor, and the tensors."""
    tensors: list[Tensor] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return TensorIndex(len(tensors) - 1)

    return replace_leaves(replace, tree), tensors


def tensor_places(tree: Any) -> tuple[str, ...]:
    """The words that lead to each tensor which ``take_tensors`` took out of a tree."""
    found: list[str] = []
    _add_places(tree, "", found)
    return tuple(found)


def _add_places(tree: Any, words: str, found: list[str]) -> None:
    if isinstance(tree, TensorIndex):
        found.append(words)
    elif type(tree) not in _LEAVES:
        for more, part in children(tree) or ():
            _add_places(part, words + more, found)


def put_tensors(tree: Any, tensors: Sequence[Any]) -> Any:
    """The inverse of ``take_tensors``, with these tensors."""
    return replace_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, TensorIndex) else leaf, tree)
