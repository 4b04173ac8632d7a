"""What a step changes besides activations, kept so that it can be run again as if for the first time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sternway.pipeline.step._stage import Stage, named_parameters


class StateBefore:
    """The gradients and buffers of some stages, as they are now."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        parameters = [parameter for _, parameter in named_parameters(stages)]
        self._grads = [(p, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
        buffers = {id(buffer): buffer for stage in stages.values() for buffer in stage.module.buffers()}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back."""
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.clone()
        for buffer, value in self._buffers:
            buffer.copy_(value)
