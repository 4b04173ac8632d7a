"""Nested containers: tuples, named tuples, lists, dicts and dataclasses with tensors at the leaves.

torch's own pytree takes a dataclass for a leaf unless it was registered; ours looks inside, since a stage's outputs
are often one. Anything that is not a container is a leaf, tensors and ``None`` included.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.autograd.graph import GradientEdge

from sternway.errors import SplitError


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container with the words that lead to them, or None for a leaf."""
    if isinstance(tree, GradientEdge):  # a named tuple, but one place in a graph
        return None
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple | list):
        return [(f"[{index}]", value) for index, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, left to right."""
    parts = children(tree)
    if parts is None:
        yield tree
    else:
        for _, part in parts:
            yield from leaves(part)


def replace_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape, with ``function(leaf)`` in place of each leaf."""
    parts = children(tree)
    if parts is None:
        return function(tree)
    values = [replace_leaves(function, part) for _, part in parts]
    if isinstance(tree, tuple):
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return values
    if isinstance(tree, Mapping):
        return dict(zip(tree, values, strict=True))
    twin = copy.copy(tree)  # not dataclasses.replace: it would run __post_init__ on gradients
    for field, value in zip(dataclasses.fields(tree), values, strict=True):
        object.__setattr__(twin, field.name, value)
    return twin


def pair_leaves(outputs: Any, grads: Any, where: str = "outputs") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of ``outputs`` with its name and its leaf of ``grads``; where ``grads`` is None, so are its leaves."""
    parts = children(outputs)
    if parts is None:
        yield where, outputs, grads
        return
    if grads is None:
        for step, part in parts:
            yield from pair_leaves(part, None, where + step)
        return
    theirs = children(grads)
    if theirs is None or len(theirs) != len(parts):
        raise SplitError(
            "grad_outputs has the structure of outputs",
            got=f"{_describe(grads)} for {where}, which is {_describe(outputs)}",
            fix="pass one gradient (or None) for each output, nested as the outputs are",
        )
    by_step = dict(theirs)
    for (step, part), (_, in_order) in zip(parts, theirs, strict=True):
        grad = by_step.get(step, in_order) if isinstance(outputs, Mapping) else in_order
        yield from pair_leaves(part, grad, where + step)


def _describe(tree: Any) -> str:
    parts = children(tree)
    return f"a {type(tree).__name__}" + (f" of {len(parts)}" if parts is not None else "")
