"""A model without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError
from sternway.pipeline.build._copied import copied
from sternway.pipeline.build._profile import total_loss


def own_or_total(output: Any, target: Any) -> Tensor:
    """A loss by default: the model's own, or the sum of all outputs that require gradients."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else total_loss(output, target)


def blank(leaf: Any) -> Any:
    """A tensor of the same shape, without memory."""
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def shadow(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters, buffers and other tensors are without memory.

    Raises:
        PipelineError: if parameters are sharded: the copy would have them whole.
    """
    sharded = next((name for name, each in model.named_parameters() if isinstance(each, DTensor)), None)
    if sharded is not None:
        raise PipelineError(
            "what a sharded model takes is not counted",
            got=f"{sharded}, a DTensor",
            fix="leave memory= out; fit counts the model before parallelize_module",
        )
    held = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    memo: dict[int, Any] = {id(tensor): blank(tensor) for tensor in (*model.buffers(), *held)}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(blank(parameter), requires_grad=parameter.requires_grad)
    return copied(model, memo)
