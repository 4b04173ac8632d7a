"""What a stage is given for a microbatch, and what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sternway._torch.tensors import storage_id
from sternway._tree import leaves
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.transport._payload import Payload


def tensors_anyway(microbatch: Microbatch, received: dict[str, Payload]) -> list[Tensor]:
    """What a stage is given for a microbatch, and a rank holds until its backward: the batch, and what arrived."""
    given = (microbatch.arguments, microbatch.keywords, microbatch.stage_kwargs, microbatch.target)
    tensors = [leaf for each in given for leaf in leaves(each) if isinstance(leaf, Tensor)]
    return [*tensors, *(tensor for _, arrived in received.values() for tensor in arrived)]


def as_sent(payloads: Mapping[str, Payload], given: Iterable[Tensor], module: nn.Module) -> dict[str, Payload]:
    """Messages without their graphs. What is in the memory of a buffer is copied: a later microbatch may change it.

    Args:
        payloads: the messages, by channel.
        given: what the stage was given, which is in no buffer.
        module: the stage's.
    """
    known = {id(tensor) for tensor in given}
    held: set[int] = set()
    if any(not t.requires_grad and id(t) not in known for _, tensors in payloads.values() for t in tensors):
        held = {storage_id(buffer) for buffer in module.buffers() if _has_storage(buffer)}
    return {name: (spec, [_to_send(t, held) for t in tensors]) for name, (spec, tensors) in payloads.items()}


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Buffer) and tensor.layout is torch.strided


def _to_send(tensor: Tensor, held: set[int]) -> Tensor:
    is_held = bool(held) and not tensor.requires_grad and _has_storage(tensor) and storage_id(tensor) in held
    return tensor.detach().clone() if is_held else tensor.detach()
