"""Sends over gloo that nobody waits for in the step that began them.

gloo sends when the other side has asked for the message. To wait for that at the end of a step would be to wait for the
other rank. So a send, and the tensor that it reads, are kept until the end of the step after it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sternway.pipeline.transport._groups import ProcessGroups


class LateSends:
    """Sends of this step and of the one before."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._now: list[tuple[Any, Tensor]] = []
        self._before: list[tuple[Any, Tensor]] = []

    def add(self, work: Any, tensor: Tensor) -> None:
        """Keep a send that was begun, and the tensor that it reads."""
        self._now.append((work, tensor))

    def finish_step(self) -> None:
        """Wait for the sends of the step before."""
        for work, _ in self._before:
            self._groups.attempt(work.wait)
        self._before, self._now = self._now, []

    def drop(self) -> None:
        """Forget them, since the pipeline is closed."""
        self._now, self._before = [], []
