"""Plain attributes of modules, to be put back: which objects they are, and what is in tensors, lists, dicts and sets.

A forward may count its calls, or leave a memory for the next one. A run that does not count must leave them as before.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from sternway._torch.tensors import version_of
from sternway.pipeline.forward._absent import Absent

_DICTS = dict, OrderedDict, defaultdict, Counter
CONTAINERS = list, set, deque, *_DICTS
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


@final
class PlainAttributes:
    """The plain attributes of modules as they are now.

    Args:
        modules: each with its own; not those of the modules in it.
        others: more values, of which what is in them is kept.

    Attributes:
        tensors: those among them, their versions, and copies.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        owners = {id(module): module for module in modules}.values()
        # A lazy module becomes another one, and then keeps what it has become.
        self._held = [(owner, type(owner), _plain(owner)) for owner in owners]
        values = {id(value): value for _, _, named in self._held for value in named.values()}
        values |= {id(value): value for value in others}
        self._contents = [(each, copy.copy(each)) for each in values.values() if type(each) in CONTAINERS]
        tensors = [value for value in values.values() if is_tracked(value)]
        self.tensors = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were. Those that came since are removed."""
        for tensor, version, value in self.tensors:
            if version_of(tensor) != version:
                tensor.copy_(value)
        for owner, kind, named in self._held:
            if type(owner) is kind:
                for name in _plain(owner).keys() - named.keys():
                    del vars(owner)[name]
                for name, value in named.items():
                    if vars(owner).get(name, named) is not value:
                        setattr(owner, name, value)
        for container, content in self._contents:
            refill(container, content)


def is_tracked(value: Any) -> bool:
    """Whether this is a tensor of which a copy can be kept."""
    return isinstance(value, Tensor) and not isinstance(value, Absent) and not value.is_inference()


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def holds(container: Any, content: Any) -> bool:
    """Whether what is in a container are the same objects as in another."""
    now, before = (
        list(each.items()) if isinstance(each, dict) else [(each,) for each in each] for each in (container, content)
    )
    return len(now) == len(before) and all(
        one is other for mine, own in zip(now, before, strict=True) for one, other in zip(mine, own, strict=True)
    )


def refill(container: Any, content: Any) -> None:
    """Make what is in a container what it was."""
    if holds(container, content):
        return
    container.clear()
    container.update(content) if isinstance(container, dict | set) else container.extend(content)
