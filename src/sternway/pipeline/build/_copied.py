"""A copy of a model that talks to the same processes as the model."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy, with the process groups and meshes that modules hold themselves, since nobody can copy these.

    Args:
        model: the model.
        memo: what stands for some of its objects in the copy, by id.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    values = (each for value in attributes for each in _with_entries(value))
    held = {id(value): value for value in values if isinstance(value, dist.ProcessGroup | DeviceMesh)}
    return copy.deepcopy(model, {**held, **(memo or {})})


def _with_entries(value: Any) -> list[Any]:
    """A value, and what is in it, if it is a container."""
    if isinstance(value, dict):
        return [value, *value.values()]
    return [value, *value] if isinstance(value, tuple | list) else [value]
