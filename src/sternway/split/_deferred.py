"""What W is made of. Eager graphs and compiled graphs defer in their own way, and meet in this protocol.

Beside the two is ``Pending``, which holds deferred work until ``run()``, and ``Accumulator``, which takes its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Protocol

from torch import Tensor

from sternway.saved import Policy
from sternway.split._accumulate import Accumulator
from sternway.split._part import Node


class Deferred(Protocol):
    """Weight gradients that I left to W. A leaf is the AccumulateGrad node of a parameter."""

    @property
    def late(self) -> Iterable[Node]:
        """Leaves whose gradient W computes, at least in part."""

    @property
    def early(self) -> Iterable[Node]:
        """Leaves whose gradient I has computed; W only accumulates it."""

    def tensors(self) -> Iterable[Tensor]:
        """The tensors that are held until W."""

    def pack(self, policy: Policy) -> None:
        """Pack the tensors that are held, until W."""

    def check(self) -> None:
        """Raise PendingError if a tensor that is held was changed in place."""

    def keep_apart(self, written: Set[int]) -> None:
        """Hold copies of what lies in the storages that W writes to, given by number: it reads them as they were."""

    def run(self, accumulator: Accumulator) -> None:
        """Compute the gradients into the accumulator, and free what was held. Called once."""
