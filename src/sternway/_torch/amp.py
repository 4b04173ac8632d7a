"""Loss scaling: what a scaler found in the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway._torch.probe import probe


class ShardScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` that unscales gradients of several meshes, and plain ones, in a call for each.

    torch would pass all of them to one operator, which takes no such mixture.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        alike: dict[Any, list[Tensor]] = {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            grad = parameter.grad
            alike.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
        found: dict[torch.device, Tensor] = {}
        for parameters in alike.values():
            some: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            for device, number in super()._unscale_grads_(some, inv_scale, found_inf, allow_fp16).items():
                found[device] = number if device not in found else torch.maximum(found[device], number)
        return found


def found_infinities(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """For each device of an optimizer's gradients, a number that is not 0 if some were not finite in ``unscale_``.

    The scaler looks at these tensors in ``step`` and ``update``, so they may be changed.
    """
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return list(found.values())


@probe(
    "torch.amp.GradScaler._found_inf_per_device",
    expected="returns what unscale_ found, and step reads it there",
    features=("pipeline",),
)
def _found_inf() -> bool:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(weight.detach())
    weight.grad = torch.ones(1)
    scaler.unscale_(optimizer)
    (found,) = found_infinities(scaler, optimizer)
    before = float(found)
    found.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    return before == 0.0 and weight.tolist() == [1.0] and scaler.get_scale() == 1.0


@probe(
    "torch.amp.GradScaler._unscale_grads_",
    expected="reads the parameters of an optimizer, and returns for each device whether gradients were not finite",
    features=("pipeline",),
)
def _unscale_grads() -> bool:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), ShardScaler("cpu", init_scale=2.0)
    scaler.scale(weight.detach())
    weight.grad = torch.full((1,), 4.0)
    scaler.unscale_(optimizer)
    return weight.grad.tolist() == [2.0] and [float(each) for each in found_infinities(scaler, optimizer)] == [0.0]
