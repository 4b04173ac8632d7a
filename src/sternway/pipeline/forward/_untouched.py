"""Runs of a sample leave a model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sternway._torch.memory import same_values
from sternway._torch.modes import buffers_by_name, hooks_since, next_hook
from sternway._torch.tensors import version_of
from sternway.pipeline.forward._plain import PlainAttributes, is_tracked
from sternway.pipeline.forward._python_random import python_unchanged


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """A block after which buffers, generators, hooks, and what modules have by name are as before.

    Of tensors, lists, dicts and sets that is also what is in them.
    """
    tensors = [tensor for module in modules for tensor in [*module.parameters(), *module.buffers()]]
    owners = list({id(owner): owner for module in modules for owner in module.modules()}.values())
    plain, first_hook = PlainAttributes(owners), next_hook()
    held = [(owner, type(owner), buffers_by_name(owner)) for owner in owners]
    buffers = {id(buffer): buffer for _, _, own in held for buffer in own.values() if is_tracked(buffer)}
    before = [
        (buffer, version_of(buffer), buffer.detach().clone()) for buffer in buffers.values() if buffer is not None
    ]
    devices = list({tensor.device for tensor in tensors if tensor.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), python_unchanged():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, value in [*before, *plain.tensors]:
                    # batch norm writes its statistics without counting up their version
                    if version_of(tensor) != version or not same_values(tensor, value):
                        tensor.copy_(value)
            for owner, kind, own in held:
                if type(owner) is kind:  # not a lazy module that has become another
                    put_buffers(owner, own)
            plain.put_back()
            for place, number in hooks_since(owners, first_hook):
                place.pop(number, None)  # copies of a module have the same places


def put_buffers(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Make these the buffers that a module has."""
    now = buffers_by_name(module)
    for name in now.keys() - buffers.keys():  # a table that was made when it was needed, and will be again
        delattr(module, name)
    for name, buffer in buffers.items():
        if name not in now or now[name] is not buffer:
            setattr(module, name, buffer)
