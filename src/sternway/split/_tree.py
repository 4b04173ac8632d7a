"""Nested containers: tuples, named tuples, lists, dicts and dataclasses with tensors at the leaves.

torch's own pytree takes a dataclass for a leaf unless it was registered; ours looks inside, since a stage's outputs
are often one. Anything that is not a container is a leaf, tensors and ``None`` included.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway.errors import SplitError


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
        return type(tree)._make(values) if hasattr(tree, "_make") else tuple(values)
    if isinstance(tree, list):
        return values
    if isinstance(tree, Mapping):
        return dict(zip(tree, values, strict=True))
    twin = copy.copy(tree)  # not dataclasses.replace: it would run __post_init__ on gradients
    for (step, _), value in zip(parts, values, strict=True):
        object.__setattr__(twin, step.removeprefix("."), value)
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
    same_keys = not isinstance(outputs, Mapping) or (isinstance(grads, Mapping) and outputs.keys() == grads.keys())
    if theirs is None or len(theirs) != len(parts) or not same_keys:
        raise SplitError(
            "grad_outputs has the structure of outputs",
            got=f"{_describe(grads)} for {where}, which is {_describe(outputs)}",
            fix="pass one gradient (or None) for each output, nested as the outputs are",
        )
    ordered = [grads[key] for key in outputs] if isinstance(outputs, Mapping) else [grad for _, grad in theirs]
    for (step, part), grad in zip(parts, ordered, strict=True):
        yield from pair_leaves(part, grad, where + step)


def _describe(tree: Any) -> str:
    parts = children(tree)
    keys = f" with {list(tree)}" if isinstance(tree, Mapping) else ""
    return f"a {type(tree).__name__}" + (f" of {len(parts)}" if parts is not None else "") + keys
