"""Hooks of parameters that must not run now: they are to run in W, or have run in I.

A hook is in a dictionary that belongs to its parameter, and other backwards may come to that parameter meanwhile: in
other threads, or inside a hook. So what stands in for a hook knows whether it is to run all the same, and how many
backwards still need it there. The last of them puts the hook back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from sternway._torch.autograd import arrival_at
from sternway._torch.hooks import tensor_hooks
from sternway.split._part import Node

Ran = dict[Node, list[int]]  # by leaf, the keys of its tensor hooks that have run in I
Where = Literal["asked", "runs"]

_swapping = threading.Lock()


class _StandIn:
    """In the place of a hook of a leaf."""

    __slots__ = ("count", "hook", "leaf")

    def __init__(self, leaf: Node, hook: Any) -> None:
        self.leaf, self.hook = leaf, hook
        self.count: dict[Where, int] = {"asked": 0, "runs": 0}

    def __call__(self, grad: Tensor) -> Tensor | None:
        arrival = arrival_at(self.leaf)
        if arrival != "none" and self.count[arrival]:
            return None
        return self.hook(grad)  # type: ignore[no-any-return]  # a user's


@contextmanager
def hiding(keys: Ran, where: Where) -> Iterator[None]:
    """Keep some tensor hooks of leaves from running in the block.

    Args:
        keys: the keys of the hooks, by leaf.
        where: in a backward that is "asked" for the leaf's gradient (I), or in one that "runs" the leaf's node (W).
    """
    hidden = []
    for leaf, wanted in keys.items():
        if wanted and (hooks := tensor_hooks(leaf.variable)):
            with _swapping:
                for key in wanted:
                    if key in hooks:
                        hidden.append((hooks, key, _stand_in(leaf, hooks, key)))
                        hidden[-1][2].count[where] += 1
    try:
        yield
    finally:
        with _swapping:
            for hooks, key, stand_in in hidden:
                stand_in.count[where] -= 1
                if not any(stand_in.count.values()) and key in hooks:  # it may be removed by now
                    hooks[key] = stand_in.hook


def _stand_in(leaf: Node, hooks: dict[int, Any], key: int) -> _StandIn:
    found = hooks[key]
    if not isinstance(found, _StandIn):
        found = hooks[key] = _StandIn(leaf, found)
    return found
