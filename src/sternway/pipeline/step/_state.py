"""What a step changes besides activations, kept so that it can be run again as if for the first time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sternway._torch.tensors import version_of
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._stage import Stage, named_parameters, tensors_anyway


class StateBefore:
    """The gradients and buffers of some stages, and the batch, as they are now."""

    def __init__(self, stages: Mapping[int, Stage], batch: Sequence[Microbatch]) -> None:
        parameters = [parameter for _, parameter in named_parameters(stages)]
        self._grads = [(p, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
        owners = {id(owner): owner for stage in stages.values() for owner in stage.module.modules()}.values()
        self._held = [(owner, dict(owner.named_buffers(recurse=False))) for owner in owners]
        buffers = {id(buffer): buffer for _, own in self._held for buffer in own.values()}
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
        given = {id(tensor): tensor for each in batch for tensor in tensors_anyway(each, {})}.values()
        usual = [tensor for tensor in given if not tensor.is_inference()]
        self._batch = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in usual]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back."""
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.clone()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for owner, own in self._held:  # a forward may have put other tensors in their places
            now = dict(owner.named_buffers(recurse=False))
            for name, buffer in own.items():
                if now.get(name) is not buffer:
                    setattr(owner, name, buffer)
        for tensor, version, value in self._batch:  # a first stage may write to it, as x.div_(255) does
            if version_of(tensor) != version:
                tensor.copy_(value)
