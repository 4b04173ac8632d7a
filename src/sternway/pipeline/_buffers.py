"""Memory to receive into, used again within a step as soon as nobody else holds it.

Autograd and the split keep what was received for as long as they need it, F to I or I to W, and nobody tells when they
let go. The storage knows: it counts its holders.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sternway.pipeline._payload import TensorSpec


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _holders(torch.empty(1))


class Buffers:
    """Gives out tensors to receive into, until ``clear``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[TensorSpec, list[Tensor]] = {}

    def take(self, described: TensorSpec) -> Tensor:
        """A tensor of that shape and type, whose memory nobody else holds."""
        made = self._made.setdefault(described, [])
        for tensor in made:
            if _holders(tensor) == _ALONE:
                return tensor.detach()
        made.append(described.empty(self.device))
        return made[-1].detach()

    def clear(self) -> None:
        """Hold on to nothing."""
        self._made.clear()
