"""What a step changes besides activations, kept so that it can be run again as if for the first time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sternway._torch.modes import buffers_by_name
from sternway._torch.tensors import version_of
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.forward._plain import PlainAttributes
from sternway.pipeline.forward._untouched import put_buffers
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._sending import tensors_anyway
from sternway.pipeline.step._stage import Stage, named_parameters


class StateBefore:
    """The gradients, buffers and plain attributes of some stages and of the loss, and the batch, as they are now."""

    def __init__(self, stages: Mapping[int, Stage], batch: Sequence[Microbatch]) -> None:
        losses = [stage.loss_fn for stage in stages.values() if stage.is_last and isinstance(stage.loss_fn, nn.Module)]
        parameters = [parameter for _, parameter in named_parameters(stages)]
        parameters += [parameter for loss in losses for parameter in loss.parameters()]
        known = {id(p): p for p in parameters}.values()
        self._grads = [(p, None if p.grad is None else p.grad.detach().clone()) for p in known]
        modules = [*(stage.module for stage in stages.values()), *losses]
        buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}.values()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        parts = [module for module in modules if isinstance(module, ModelPart)]
        own = {id(part.attributes): part.attributes for part in parts}.values()
        all_modules = [each for stage in stages.values() for each in stage.all_modules()]
        all_modules += [each for loss in losses for each in loss.modules()]
        owners = {id(each): each for each in all_modules if not isinstance(each, ModelPart)}.values()
        self._held = [(owner, buffers_by_name(owner)) for owner in [*parts, *owners]]
        self._plain = PlainAttributes(owners, [value for each in own for value in each.values()])
        self._own = [each.taken() for each in own]
        given = {id(tensor): tensor for each in batch for tensor in tensors_anyway(each, {})}.values()
        counted = [tensor for tensor in given if not tensor.is_inference()]
        self._batch = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in counted]

    @torch.no_grad()
    def restore(self) -> None:
        """Set them back."""
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.clone()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        for owner, own in self._held:  # a forward may have put other tensors in their places
            put_buffers(owner, own)
        self._plain.put_back()
        for put_back in self._own:
            put_back()
        for tensor, version, value in self._batch:  # a first stage may write to it, as x.div_(255) does
            if version_of(tensor) != version:
                tensor.copy_(value)
