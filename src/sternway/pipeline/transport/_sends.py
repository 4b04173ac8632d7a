"""Sends over gloo that were begun, and the tensors that they read.

gloo sends a message when the other side has asked for it. At the end of a step a rank waits for what it has sent:
whoever gets it is in the same step, and asks ahead. So an earlier rank never waits for a later one to end a step of
training, and a process that ends after a step leaves nothing unsent.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sternway.pipeline.transport._groups import ProcessGroups


class Sends:
    """Sends of one step."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._begun: list[tuple[Any, Tensor]] = []

    def add(self, work: Any, tensor: Tensor) -> None:
        """Keep a send, and the tensor that it reads."""
        self._begun.append((work, tensor))

    def finish(self) -> None:
        """Wait for all of them."""
        for work, _ in self._begun:
            self._groups.attempt(work.wait)
        self._begun.clear()

    def drop(self) -> None:
        """Forget them, since the pipeline is closed."""
        self._begun.clear()
