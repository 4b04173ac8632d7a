"""A model whose parameters are on the meta device: it is cut first, and then each process gets the tensors it needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline.build._copied import copied

Weights = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Given names of parameters and saved buffers, these tensors."""


def is_empty(model: Any) -> bool:
    """Whether a model has parameters without memory."""
    return isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())


def on_zeros(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are zeros on the CPU, as are buffers on meta, to run its forward.

    The system maps zeros that nobody has written to one page of memory, so the copy is small, whatever its parameters'
    size.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta:
            memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return copied(model, memo).cpu()


def fill(model: nn.Module, names: Collection[str], weights: Weights, device: torch.device) -> None:
    """Give a model the parameters and saved buffers of these names, and move all its other buffers to the device.

    Tied names stay one parameter. Parameters that have memory already (adapters) are moved; the others of the model
    stay on meta. Of buffers on meta, those that these names are of are asked for, too, also if they are never saved.

    Raises:
        PipelineError: if ``weights`` returns too little, or another shape.
    """
    with torch.no_grad():
        _move(model, device, set(names))
        wanted = _wanted(model, names)
        found = weights(wanted)
        if not isinstance(found, Mapping) or any(name not in found for name in wanted):
            got = sorted(set(wanted) - set(found))[0] if isinstance(found, Mapping) else type(found).__name__
            raise PipelineError(
                "weights must return a dict with each name that it was asked for", got=got, fix="return all of them"
            )
        for name in wanted:
            _put(model, name, found[name].to(device))


def _wanted(model: nn.Module, names: Collection[str]) -> list[str]:
    """Of these names, those to be read: parameters on meta, each once, and buffers that are saved or on meta."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    empty = {name: each for name, each in model.named_buffers(remove_duplicate=False) if each.is_meta}
    known = model.state_dict(keep_vars=True) | empty
    seen: set[int] = set()
    wanted = []
    for name in names:
        tensor = known.get(name)
        if tensor is None or id(tensor) in seen or (name in parameters and not tensor.is_meta):
            continue
        seen.add(id(tensor))
        wanted.append(name)
    return wanted


def _move(model: nn.Module, device: torch.device, names: set[str]) -> None:
    for path, module in model.named_modules():
        for short, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, short, buffer.to(device))
        for short, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta and (f"{path}.{short}" if path else short) in names:
                parameter.data = parameter.data.to(device)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter under all its names, or write a buffer."""
    owner, _, short = name.rpartition(".")
    old = getattr(model.get_submodule(owner), short)
    if old.shape != value.shape:
        raise PipelineError(
            f"weights must return {name} in the model's shape {list(old.shape)}",
            got=str(list(value.shape)),
            fix="pass the weights of this model",
        )
    if not isinstance(old, nn.Parameter) and not old.is_meta:
        old.copy_(value)
        return
    new = value.to(old.dtype)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for module in model.modules():
        for own, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor is old:
                setattr(module, own, new)
