"""A model without memory, and blocks that are computed again in the backward."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError
from sternway.pipeline.build._partition import Layout
from sternway.pipeline.build._profile import total_loss
from sternway.pipeline.step._again import RecomputedForward


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


STATEFUL = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
"""What changes a buffer in its forward: to run it again would change that twice."""


def recompute_blocks(
    model: nn.Module, layout: Layout, names: Collection[str] | None = None, *, randomly: bool = True
) -> list[nn.Module]:
    """Put the blocks that a model repeats under activation checkpointing, and return them; none with batch norms.

    Args:
        model: the model.
        layout: where it can be cut.
        names: of pieces of the model, of which the others stay as they are; all by default.
        randomly: whether random numbers are the same again, as dropout needs.
    """
    pieces = {name: model.get_submodule(name) for name, _ in layout.calls}
    kinds = Counter(type(module) for module in pieces.values())
    wanted = {name: module for name, module in pieces.items() if names is None or name in names}
    repeated = [module for module in wanted.values() if kinds[type(module)] > 1]
    blocks = [block for block in repeated if not any(isinstance(module, STATEFUL) for module in block.modules())]
    for block in blocks:
        block.forward = RecomputedForward(block, block.forward, randomly=randomly)
    return blocks


def recompute_stages(model: nn.Module, layout: Layout, starts: Sequence[int], stages: Collection[int]) -> None:
    """Recompute the blocks of these stages, of those that begin at ``starts``.

    Raises:
        PipelineError: if one of them has no block that can be recomputed.
    """
    stage_of_call = layout.stage_of_call(starts)
    for wanted in stages:
        names = {name for (name, _), stage in stage_of_call.items() if stage == wanted}
        already = {name for name in names if _is_recomputed(model, name)}
        if not recompute_blocks(model, layout, names - already) and not already:
            raise PipelineError(
                "a stage that is recomputed must have a block that the model repeats, without batch norms",
                got=f"stage {wanted} of {', '.join(sorted(names))}",
                fix="leave it out of the schedule's recompute, or use torch.utils.checkpoint in the model",
            )


def _is_recomputed(model: nn.Module, name: str) -> bool:
    """Whether a piece is in an earlier stage, too, which is recomputed."""
    return isinstance(vars(model.get_submodule(name)).get("forward"), RecomputedForward)


@contextmanager
def recomputing(model: nn.Module, layout: Layout, starts: Sequence[int], stages: Collection[int]) -> Iterator[None]:
    """A block in which ``recompute_stages`` is in effect."""
    before = [(module, vars(module).get("forward")) for module in model.modules()]
    recompute_stages(model, layout, starts, stages)
    try:
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
