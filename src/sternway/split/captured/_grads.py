"""The memory that a captured W adds to: a buffer for each parameter, at an address that never changes.

A replay adds to the buffers, whatever is in ``.grad``. Usually that is the buffer itself: the first W puts it there.
Elsewhere the buffer starts from zero, and what W added is taken from it afterwards:

    .grad                            before the replay         after it
    the buffer                       –                         –
    None, as after zero_grad()       zero it                   .grad is the buffer
    a tensor of the user's           zero it                   add it to that tensor
    of a parameter with hooks        set it aside, zero it     the engine adds it, and runs the hooks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from sternway._torch.tensors import storage_uses, zero_each
from sternway.errors import PendingError


@dataclass(slots=True)
class _Place:
    """A parameter and its buffer. ``shown`` is the tensor with the buffer's memory that was put into ``.grad``."""

    parameter: Tensor
    buffer: Tensor
    shown: TensorWeakRef | None = None

    def is_in_grad(self) -> bool:
        grad, buffer = self.parameter.grad, self.buffer
        return grad is not None and grad.data_ptr() == buffer.data_ptr() and grad.stride() == buffer.stride()

    def show(self) -> None:
        """Put the buffer into ``.grad``, as a tensor of its own."""
        self.parameter.grad = shown = self.buffer.data
        self.shown = TensorWeakRef(shown)

    def take_back(self) -> None:
        """Give what was in ``.grad`` a memory of its own, if somebody still holds it.

        Raises:
            PendingError: if a view of it is held, which cannot be given another memory.
        """
        if storage_uses(self.buffer) == _unshared():
            return
        earlier = None if self.shown is None else self.shown()
        if earlier is not None:
            earlier.data = earlier.clone()
        if storage_uses(self.buffer) != _unshared():
            raise PendingError(
                "a view of an earlier .grad of a captured module must not be kept: W would write to it",
                got=f"a view of the gradient of a parameter of shape {tuple(self.parameter.shape)}",
                fix="keep a copy, such as parameter.grad.flatten().clone()",
            )


def _unshared() -> int:
    """The count of a storage that one tensor holds."""
    if not _UNSHARED:
        _UNSHARED.append(storage_uses(torch.empty(1)))
    return _UNSHARED[0]


_UNSHARED: list[int] = []


class GradBuffers:
    """The buffers of one captured module's parameters, for all its graphs."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    def include(self, parameters: Iterable[Tensor]) -> None:
        """Make buffers for these parameters, too."""
        for parameter in parameters:
            if id(parameter) not in self._places:
                buffer = torch.zeros_like(parameter, requires_grad=False)
                self._places[id(parameter)] = _Place(parameter, buffer)

    @contextmanager
    def in_grad(self, parameters: Sequence[Tensor], stand_ins: Mapping[int, Tensor]) -> Iterator[None]:
        """A block in which each ``.grad``, also of a stand-in, is the buffer, for the capture of a W.

        Afterwards it is None.
        """
        pairs = [(each, self._places[id(p)].buffer) for p in parameters for each in (p, stand_ins.get(id(p), p))]
        for each, buffer in pairs:
            each.grad = buffer
        try:
            yield
        finally:
            for each, _ in pairs:
                each.grad = None

    @contextmanager
    def adding(self, direct: Iterable[Tensor], others: Iterable[Tensor], exact: bool) -> Iterator[list[Tensor]]:
        """A block that replays a W.

        Args:
            direct: parameters whose ``.grad`` gets what is added.
            others: those whose ``.grad`` stays as it is.
            exact: compute what is added before it is added, so that both are rounded on their own.

        Yields:
            A list that has, after the block, what was added for each of ``others``.
        """
        empty: list[_Place] = []  # zeroed, and then shown
        kept: list[tuple[_Place, Tensor]] = []  # zeroed, and then this is added
        foreign: list[_Place] = []  # zeroed, and then added to .grad
        aside: list[tuple[_Place, Tensor | None]] = []  # zeroed, and then this is in it again
        for parameter in direct:
            place = self._places[id(parameter)]
            if place.is_in_grad():
                if exact:
                    kept.append((place, place.buffer.clone()))
                continue
            place.take_back()
            (empty if parameter.grad is None else foreign).append(place)
        for parameter in others:
            place = self._places[id(parameter)]
            if not place.is_in_grad():
                place.take_back()
            aside.append((place, place.buffer.clone() if place.is_in_grad() else None))
        zeroed = [*empty, *foreign, *(place for place, _ in (*kept, *aside))]
        if zeroed:
            zero_each([place.buffer for place in zeroed])
        added: list[Tensor] = []
        try:
            yield added
        except BaseException:  # of Python between graphs
            for place, before in (*kept, *aside):
                if before is not None:
                    place.buffer.copy_(before)
            raise
        for place in empty:
            place.show()
        for place in foreign:
            grad = place.parameter.grad
            assert grad is not None
            grad.add_(place.buffer)
        for place, total in kept:
            place.buffer.add_(total)
        for place, before in aside:
            added.append(place.buffer.clone())
            if before is not None:
                place.buffer.copy_(before)
