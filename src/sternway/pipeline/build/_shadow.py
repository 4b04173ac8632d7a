"""A model without memory, and blocks that are computed again in the backward."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sternway.errors import PipelineError
from sternway.pipeline.build._partition import Layout
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
    return copy.deepcopy(model, memo)


_STATEFUL = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""What changes a buffer in its forward: to run it again would change that twice."""


def recompute_blocks(model: nn.Module, layout: Layout, *, randomly: bool = True) -> list[nn.Module]:
    """Put the blocks that a model repeats under activation checkpointing, and return them; none with batch norms.

    Args:
        model: the model.
        layout: where it can be cut.
        randomly: whether random numbers are the same again, as dropout needs.
    """
    pieces = {name: model.get_submodule(name) for name, _ in layout.calls}
    kinds = Counter(type(module) for module in pieces.values())
    repeated = [module for module in pieces.values() if kinds[type(module)] > 1]
    blocks = [block for block in repeated if not any(isinstance(module, _STATEFUL) for module in block.modules())]
    for block in blocks:
        again = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=randomly)
        block.forward = again
    return blocks


@contextmanager
def recomputing(model: nn.Module, layout: Layout) -> Iterator[None]:
    """A block in which ``recompute_blocks`` is in effect."""
    before = [(module, vars(module).get("forward")) for module in model.modules()]
    recompute_blocks(model, layout)
    try:
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
