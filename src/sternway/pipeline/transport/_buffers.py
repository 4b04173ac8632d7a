"""Buffers to receive into, used again within a step as soon as nothing else holds their memory.

Autograd and the split keep received tensors for as long as they need them, from F to I or from I to W, and do not say
when they are done. The storage knows, because it counts its references.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sternway._torch.tensors import storage_uses
from sternway.pipeline.transport._payload import TensorSpec


class Buffers:
    """Gives out tensors to receive into, until ``clear``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._unshared = storage_uses(torch.empty(1))  # the count of a storage that one tensor holds

    def take(self, described: TensorSpec) -> Tensor:
        """A tensor of that shape and dtype, whose memory nothing else holds."""
        made = self._made.setdefault((described.memory_shape, described.dtype), [])
        for tensor in made:
            if storage_uses(tensor) == self._unshared:
                return tensor.detach()
        made.append(described.empty(self.device))
        return made[-1].detach()

    def clear(self) -> None:
        """Drop all buffers."""
        self._made.clear()
