"""Runs of a sample leave a model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from sternway._torch.memory import same_values
from sternway._torch.tensors import version_of

_PLAIN = bool, int, float, complex, str, NoneType, Tensor


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """A block after which buffers, numbers and tensors that modules have by name, and generators are as before."""
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    owners = {id(owner): owner for module in modules for owner in module.modules()}.values()
    held = [(owner, type(owner), _held(owner)) for owner in owners]
    named = {id(value): value for _, _, values in held for value in values.values() if _is_tracked(value)}
    before = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in named.values()]
    with torch.random.fork_rng(devices=list({tensor.device for tensor in tensors if tensor.device.type == "cuda"})):
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


def _held(module: nn.Module) -> dict[str, Any]:
    """The buffers and plain attributes of a module, by name."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
    return plain | dict(module.named_buffers(recurse=False))


def _is_tracked(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _put_back(module: nn.Module, named: dict[str, Any]) -> None:
    now = vars(module) | dict(module.named_buffers(recurse=False))
    for name, value in named.items():
        if name in now and now[name] is not value:
            setattr(module, name, value)
