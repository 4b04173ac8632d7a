"""Outputs that no gradient is expected for, and backwards that do not begin there.

Code between the modules may send a value that leads to nothing. What comes back for it is zeros, in the place of no
gradient. To begin a backward there would give zeros to weights that have none in one process, and an optimizer may
change these. So the host looks whether it is zeros; but it would wait for a GPU. There it looks in the first step, then
leaves out what was zeros, and sees at the end of each step that it was so again.

Of stages that were passed one by one nobody knows what they use. Their gradients come back as they are: where there is
none, a CPU sends a number that no gradient is made of, everywhere. A GPU sends zeros, since to look would be to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.transport import _later


@final
class DeadOutputs:
    """What comes back for the dead outputs of one stage."""

    def __init__(self) -> None:
        self._alive: set[int] = set()  # places among the outputs where a gradient came all the same
        self._looked: set[int] = set()  # places that were looked at in an earlier step
        self._now: set[int] = set()  # and in this one
        self._zeros: list[Callable[[], bool]] = []  # whether what was left out in this step was zeros

    def got_some(self, place: int, grad: Tensor) -> bool:
        """Whether what came back for the dead output at this place is not zeros, as far as known without a wait."""
        some = grad.any()
        if _later.is_here(some):
            return bool(some)
        if place in self._looked:
            if place not in self._alive:
                number = _later.to_host(some.float())
                self._zeros.append(lambda: number()[0][0] == 0)
            return place in self._alive
        self._now.add(place)
        if has_some := bool(some):
            self._alive.add(place)
        return has_some

    def check(self) -> None:
        """At the end of a step: raise if a gradient was left out."""
        if not all(is_zeros() for is_zeros in self._zeros):
            raise PipelineError(
                "code between the modules must use the same values in every step, on a GPU",
                got="a gradient of a value that led to nothing in the first step",
                fix="use the value in every step, if only times 0",
            )

    def clear(self) -> None:
        """The step is over."""
        self._looked |= self._now
        self._now.clear()
        self._zeros.clear()


def no_gradient(like: Tensor) -> Tensor:
    """What is sent in the place of a gradient that there is none of."""
    return torch.full_like(like, _mark(like)) if _is_here(like) else torch.zeros_like(like)


def is_none(grad: Tensor | None) -> bool:
    """Whether ``no_gradient`` was sent."""
    if grad is None or type(grad) is not Tensor or not grad.numel() or not _is_here(grad):
        return False
    return bool(grad[(0,) * grad.ndim] == _mark(grad)) and bool((grad == _mark(grad)).all())


def _is_here(tensor: Tensor) -> bool:
    return _later.is_here(tensor) and tensor.device.type == "cpu"


def _mark(like: Tensor) -> float:
    return 85 / 64 * float(torch.finfo(like.dtype).smallest_normal)  # in seven bits: bfloat16 has it, too
