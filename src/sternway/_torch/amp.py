"""Loss scaling: what a scaler found in the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sternway._torch.probe import probe


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
