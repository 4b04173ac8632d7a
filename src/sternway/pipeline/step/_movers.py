"""What moves the activations of a stage's microbatches: one policy for each that is away at once, used again later.

A policy keeps buffers, and for a disk threads. So those of microbatches whose backward is done serve the next ones, in
the same step and in later ones.
"""

from __future__ import annotations

from collections.abc import Callable

from sternway.saved import Offload


class Movers:
    """The policies of one stage.

    Args:
        make: makes another one.
    """

    def __init__(self, make: Callable[[], Offload]) -> None:
        self._make = make
        self._free: list[Offload] = []
        self._taken: dict[int, Offload] = {}

    def take(self, number: int) -> Offload:
        """A policy for a microbatch, from its F on."""
        self._taken[number] = self._free.pop() if self._free else self._make()
        return self._taken[number]

    def of(self, number: int) -> Offload:
        """The policy of a microbatch."""
        return self._taken[number]

    def give(self, number: int) -> None:
        """The backward of a microbatch is done; it need not have been moved."""
        if number in self._taken:
            self._free.append(self._taken.pop(number))

    def give_all(self) -> None:
        """The step is over, or has failed."""
        for number in list(self._taken):
            self.give(number)

    def close(self) -> None:
        """End all of them, with their threads and files."""
        self.give_all()
        for policy in self._free:
            policy.close()
