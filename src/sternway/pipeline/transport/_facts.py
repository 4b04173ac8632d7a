"""What the first rank tells all others about a step.

It travels from rank to rank, ahead of the first activation. So every rank waits only for what it needs anyway, and the
first rank waits for nobody: it may be in the next step while the last one is still in this one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Self

import torch
from torch import Tensor

from sternway.errors import PipelineError

_SAMPLED = 1024  # entries of a tensor


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the first rank tells about a step; the others compare it with what they were called with.

    Example:
        >>> facts = StepFacts(training=True, shapes=3, rows=8)
        >>> StepFacts.from_numbers(facts.to_numbers()) == facts
        True

    Attributes:
        training: whether there will be a backward.
        tunes: whether "auto" may change the schedule after it.
        options: a checksum of the other arguments of ``step``, which must be the same on all ranks.
        trial: a checksum of the arguments of the last ``optimizer_step``, if it is on trial; else 0.
        shapes: a checksum of the shapes of the batch.
        rows: how many rows the batch has; 0 if it cannot be said.
        seed: the random numbers of the step begin with it.
        target: a checksum of the target; 0 if there is none, or it would have to be waited for.
    """

    training: bool = False
    tunes: bool = False
    options: int = 0
    trial: int = 0
    shapes: int = 0
    rows: int = 0
    seed: int = 0
    target: int = 0

    def to_numbers(self) -> list[int]:
        """As numbers that a message can carry."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Self:
        training, tunes, *others = numbers
        return cls(bool(training), bool(tunes), *others)

    def check(self, mine: StepFacts) -> None:
        """Raise unless this rank was called as the first one was; ``mine`` has a target where the loss is computed.

        Raises:
            PipelineError: if it was not.
        """
        if self.training != mine.training:
            called = {False: "evaluate", True: "step"}
            raise PipelineError(
                "all ranks must call step, or all evaluate",
                got=f"{called[mine.training]} here, {called[self.training]} on the first rank",
                fix="make the same calls on every rank",
            )
        if self.options != mine.options:
            raise PipelineError(
                "all ranks must call step with the same loss_everywhere, record and nonfinite",
                got="others here than on the first rank",
                fix="pass the same on every rank",
            )
        if self.tunes != mine.tunes:
            called = {False: "a call", True: "no call"}
            raise PipelineError(
                "all ranks must call stop_tuning after the same step, or none",
                got=f"{called[mine.tunes]} here, {called[self.tunes]} on the first rank",
                fix="call it on every rank, not on one alone",
            )
        if self.trial != mine.trial:
            here, there = ("no call" if not trial else "a call" for trial in (mine.trial, self.trial))
            raise PipelineError(
                "all ranks must call optimizer_step with the same max_norm and nonfinite, or none",
                got=f"{here} here, {there} on the first rank" if here != there else "others than on the first rank",
                fix="call it on every rank after each step",
            )
        if self.target and mine.target and self.target != mine.target:
            raise PipelineError(
                "the target must belong to the batch, which is that of the first rank",
                got="another target here than there",
                fix="give all ranks the same batches: one seed for all, or one sampler, if a DataLoader shuffles; or "
                "pass target= on the rank of the last stage alone",
            )


def checksum(text: str) -> int:
    """A number, never 0, that most likely differs where texts do."""
    return zlib.crc32(text.encode()) or 1


def sample_checksum(tensor: Tensor) -> int:
    """A number that most likely differs where tensors do, by entries from all over it. Waits for a GPU."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: flat.numel() // _SAMPLED | 1].cpu().contiguous()  # odd, so that not all are of one column
    return zlib.crc32(some.view(torch.uint8).numpy().tobytes(), zlib.crc32(str(tuple(tensor.shape)).encode())) or 1
