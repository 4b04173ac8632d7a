"""Hooks of parameters that must not run now: they are to run in W, or have run in I.

A hook is in a dictionary that belongs to its parameter, and other backwards may come to that parameter meanwhile: in
other threads, or inside a hook. So what stands in for a hook calls it in all backwards but those that it is hidden
from, which have a *mark* among their roots: an empty leaf of their own, at which no other backward arrives. The last
that needs a stand-in puts the hook back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sternway._torch.autograd import arrival_at, edge_of
from sternway._torch.hooks import tensor_hooks
from sternway.split._part import Node

Ran = dict[Node, list[int]]  # by leaf, the keys of its tensor hooks that have run in I

_swapping = threading.Lock()


class _StandIn:
    """In the place of a hook of a leaf."""

    __slots__ = ("hook", "marks")

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.marks: tuple[Node, ...] = ()  # of the backwards that the hook is hidden from

    def __call__(self, grad: Tensor) -> Tensor | None:
        for mark in self.marks:
            if arrival_at(mark) != "none":
                return None
        return self.hook(grad)  # type: ignore[no-any-return]  # a user's


@contextmanager
def hiding(keys: Ran) -> Iterator[Tensor | None]:
    """Keep some tensor hooks of leaves from running in backwards of the block that begin at the mark, too.

    Args:
        keys: the keys of the hooks, by leaf.

    Yields:
        The mark, which such a backward takes as one more root; None if nothing is hidden.
    """
    found = [(hooks, wanted) for leaf, wanted in keys.items() if wanted and (hooks := tensor_hooks(leaf.variable))]
    if not found:
        yield None
        return
    mark = torch.empty(0, requires_grad=True)
    node = edge_of(mark).node
    with _swapping:
        hidden = [(hooks, key, _stand_in(hooks, key)) for hooks, wanted in found for key in wanted if key in hooks]
        for *_, stand_in in hidden:
            stand_in.marks += (node,)
    try:
        yield mark
    finally:
        with _swapping:
            for hooks, key, stand_in in hidden:
                stand_in.marks = tuple(other for other in stand_in.marks if other is not node)
                if not stand_in.marks and key in hooks:  # it may be removed by now
                    hooks[key] = stand_in.hook


def _stand_in(hooks: dict[int, Any], key: int) -> _StandIn:
    found = hooks[key]
    if not isinstance(found, _StandIn):
        found = hooks[key] = _StandIn(found)
    return found
