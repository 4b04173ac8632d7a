"""Saved tensors that are not simply there: packed by hooks, or to be recomputed by a checkpoint.

A rule reads a tensor that the node reads too, when it runs. Three cases, by who packed it:

- nobody: both read it; it is one tensor.
- ``torch.utils.checkpoint`` (``use_reentrant=False``): the first read recomputes the whole region, and each tensor may
  be read once in a backward. ``read_again`` grants more reads. The rule reads while the engine is about to run the
  node, so that it is the same recomputation, and no region is recomputed before its turn.
- other hooks (``save_on_cpu``, a user's): unpacking may be costly (a copy back from the CPU) and may be counted. The
  node unpacks whatever it saved even if only its input gradient is asked for, so waiting would unpack twice. Such a
  node is left to I.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

from torch.utils import checkpoint


class Packing(Enum):
    """Who packed a node's saved tensors."""

    NONE = 0
    CHECKPOINT = 1
    FOREIGN = 2


@cache
def _slots(node_type: Hashable) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


@cache
def _unpack_hooks(node_type: Hashable) -> tuple[Callable[[Any], Any], tuple[Any, ...]]:
    """A function that reads all the node's unpack hooks at once, and what it gives where there are none."""
    # Two names at least, for the getter to give a tuple whatever the number of slots.
    names = [f"{name}.unpack_hook" for name in _slots(node_type)]
    return attrgetter("__class__", "__class__", *names), (node_type, node_type, *[None] * len(names))


def _packed(node: Any) -> list[Any]:
    """What hooks made of the node's saved tensors; nothing is unpacked."""
    found: list[Any] = []
    for name in _slots(node.__class__):
        slot = getattr(node, name)
        for saved in slot if isinstance(slot, tuple) else (slot,):
            if saved is not None and saved.unpack_hook is not None:
                found.append(saved.data)
    return found


def packing(node: Any) -> Packing:
    """Who packed the node's saved tensors; of several, the most restrictive."""
    read, none = _unpack_hooks(node.__class__)
    try:
        if read(node) == none:
            return Packing.NONE
    except AttributeError:  # a slot that is empty, or a list of tensors
        pass
    packed = _packed(node)
    if not packed:
        return Packing.NONE
    if all(isinstance(data, checkpoint._Holder) for data in packed):
        return Packing.CHECKPOINT
    return Packing.FOREIGN


class _MoreReads(dict[Any, Any]):
    """A holder's ``handles``, where marking the tensor as read is ignored the first few times."""

    def __init__(self, handles: dict[Any, Any], more: int) -> None:
        super().__init__(handles)
        self.more = more

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is None and self.more:
            self.more -= 1
        else:
            super().__setitem__(group, handle)


def read_again(node: Any, times: int) -> None:
    """Let each tensor that a checkpoint stands in for be read so many times more than it allows."""
    for holder in _packed(node):
        holder.handles = _MoreReads(holder.handles, times)
