"""Runs of a sample leave a model as it was."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch.memory import same_values
from sternway._torch.tensors import version_of
from sternway.pipeline.forward._python_random import python_unchanged

_PLAIN = bool, int, float, complex, str, NoneType, Tensor
_CONTAINERS = list, dict, set, deque
_OF_TORCH = frozenset(vars(nn.Module()))


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """A block after which buffers, generators, and what modules have by name are as before.

    That is numbers, text, tensors, and lists, dicts and sets as far as what is in them.
    """
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    owners = {id(owner): owner for module in modules for owner in module.modules()}.values()
    held = [(owner, type(owner), _held(owner)) for owner in owners]
    contents = [(each, copy.copy(each)) for owner in owners for each in _containers(owner)]
    named = {id(value): value for _, _, values in held for value in values.values() if _is_tracked(value)}
    before = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in named.values()]
    devices = list({tensor.device for tensor in tensors if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), python_unchanged():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, value in before:
                    # batch norm writes its statistics without counting up their version
                    if version_of(tensor) != version or not same_values(tensor, value):
                        tensor.copy_(value)
            for owner, kind, values in held:
                if type(owner) is kind:  # not a lazy module that has become another
                    _put_back(owner, values)
            for container, content in contents:
                _refill(container, content)


def _held(module: nn.Module) -> dict[str, Any]:
    """The buffers and plain attributes of a module, by name."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
    return plain | dict(module.named_buffers(recurse=False))


def _containers(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if type(value) in _CONTAINERS and name not in _OF_TORCH]


def _refill(container: Any, content: Any) -> None:
    """Make what is in a container what it was."""
    now, before = (
        list(each.items()) if type(each) is dict else [(each,) for each in each] for each in (container, content)
    )
    if len(now) == len(before) and all(
        one is other for mine, own in zip(now, before, strict=True) for one, other in zip(mine, own, strict=True)
    ):
        return
    container.clear()
    container.update(content) if type(container) in (dict, set) else container.extend(content)


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _put_back(module: nn.Module, named: dict[str, Any]) -> None:
    now = vars(module) | dict(module.named_buffers(recurse=False))
    for name, value in named.items():
        if name in now and now[name] is not value:
            setattr(module, name, value)
