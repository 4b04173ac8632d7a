"""Outputs and their gradients, leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sternway._tree import children
from sternway.errors import SplitError


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
