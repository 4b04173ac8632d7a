"""Where the backward of a microbatch starts: at what the stage has sent, whose memory it does not keep.

Of a tensor that was sent, the backward needs its place in the graph alone, an edge. So the tensor goes when its message
is gone, unless autograd has saved it for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from sternway._torch.autograd import edge_of, gradient_slots

Place = Tensor | GradientEdge
_NO_SAY = nn.Parameter.__torch_function__  # that of subclasses which leave torch's functions as they are


class Root(NamedTuple):
    """One place where a backward starts.

    Attributes:
        place: an edge, or a tensor that is kept.
        is_dead: whether no gradient is expected there: if it is zero, there is none.
    """

    place: Place
    is_dead: bool = False

    @classmethod
    def of(cls, tensor: Tensor, is_dead: bool = False) -> Root:
        """That of a tensor which is sent.

        A leaf is kept: the stage has it anyway, as an input or a parameter. So is what torch knows no edge for, or a
        subclass that has a say in its backward.
        """
        has_say = type(tensor).__torch_function__ not in (Tensor.__torch_function__, _NO_SAY)
        if tensor.grad_fn is None or has_say or tensor.layout is not torch.strided or tensor.is_nested:
            return cls(tensor, is_dead)
        return cls(edge_of(tensor), is_dead)

    @property
    def device(self) -> str:
        """The kind of device that its gradient is on."""
        place = self.place
        where = gradient_slots(place.node)[place.output_nr] if isinstance(place, GradientEdge) else place
        kind: str = where.device.type
        return kind
