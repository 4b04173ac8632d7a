"""What ranks tell each other before a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one rank tells the others before a step, and when the pipeline is built.

    Example:
        >>> facts = StepFacts(schedule=7, shapes=3, training=True)
        >>> StepFacts.from_numbers(facts.to_numbers()) == facts
        True

    Attributes:
        schedule: a checksum of the schedule, which must be the same on all ranks.
        shapes: a checksum of the shapes of the batch, as far as this rank has it.
        training: whether there will be a backward.
        square: this rank's share of the squared norm of the gradients, if its last optimizer step is on trial.
    """

    schedule: int = 0
    shapes: int = 0
    training: bool = False
    square: float | None = None

    def to_numbers(self) -> list[float]:
        """As numbers that a collective can carry; -1, which no square can be, stands for None."""
        return [self.schedule, self.shapes, self.training, -1.0 if self.square is None else self.square]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Self:
        schedule, shapes, training, square = numbers
        return cls(int(schedule), int(shapes), bool(training), None if square < 0 else square)


def checksum(text: str) -> int:
    """A number that most likely differs where texts do."""
    return zlib.crc32(text.encode())
