"""What a pipeline needs of whatever carries its messages.

A transport drives the programs of the ranks (``_routes.py``): it answers what they wait for and takes what they send.
It also does what concerns all ranks at once: tell them about a step, add tensors up, gather numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.faults._watch import Watch
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._crew import Crew
from sternway.pipeline.transport._facts import StepFacts
from sternway.pipeline.transport._later import Rows
from sternway.pipeline.transport._routes import RankProgram, Routes
from sternway.schedule import Schedule


class Transport(ABC):
    """Carries a pipeline's messages.

    Attributes:
        ranks: how many ranks the pipeline has; 0 if the schedule decides.
        mine: the one rank that this process runs; empty if this process runs all.
        device: where the stages of this process are.
        watch: finds ranks that are lost; None if there is nothing to watch.
    """

    ranks: int
    mine: tuple[int, ...]
    device: torch.device
    watch: Watch | None = None

    @abstractmethod
    def place(self, devices: Sequence[torch.device]) -> None:
        """Learn on which devices the stages of this process are. All ranks call it together, before anything else.

        Raises:
            PipelineError: on every rank, if messages cannot be sent between the devices of all ranks.
        """

    @abstractmethod
    def connect(self, schedule: Schedule, routes: Routes) -> None:
        """Open what the messages of a schedule need. All ranks call it together, once the schedule is known."""

    @abstractmethod
    def announce(self, prepare: Callable[[], StepFacts]) -> StepFacts:
        """What the first rank says about the coming step, where ``prepare`` is called. No rank waits for a later one.

        Raises:
            PipelineError: on every rank, if ``prepare`` raises. Nobody has begun then.
        """

    @abstractmethod
    def drive(self, programs: dict[int, RankProgram], facts: StepFacts) -> None:
        """Run the programs of this process's ranks to their end, given what was announced about the step."""

    @abstractmethod
    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        """Every rank's row of numbers, given the rows of this process's ranks; all rows have one length."""

    @abstractmethod
    def gather_later(self, numbers: Callable[[], Rows], members: Sequence[int] | None = None) -> Callable[[], Rows]:
        """The same without a wait: a function that waits for every rank's row.

        ``numbers`` returns the rows of this process's ranks; it may be called later, in another thread, to wait for a
        GPU. With ``members``, global ranks of which some are in other pipelines, the rows are theirs.
        """

    @abstractmethod
    def hear_later(self, said: bytes, members: Sequence[int] | None = None) -> Callable[[], bytes]:
        """What the first rank, or the first of ``members``, has ``said`` here; a function that waits for it."""

    @abstractmethod
    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        """Replace tensors by their sum over ``ranks``, in place. Only those ranks call it."""

    @abstractmethod
    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Overwrite ``tensor`` on ``ranks`` by that of rank ``source``. Only those ranks call it."""

    def delay(self, nbytes: int) -> float:
        """The seconds that a message of so many bytes takes between two ranks. All ranks call it together."""
        return 0.0

    @abstractmethod
    def crew(self) -> Crew:
        """The pipeline's processes, for decisions between steps."""

    @abstractmethod
    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        """The pipeline's processes, or these global ranks, with a group of their own, for use in another thread."""

    @abstractmethod
    def collective(self, members: Sequence[int]) -> Collective:
        """These global ranks, for sums that end together with the pipeline. All of them call it."""

    @abstractmethod
    def explain(self, error: Exception) -> PipelineError:
        """The error to raise after a connection was lost: it says which rank was lost."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and close the transport."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was opened for the pipeline. The transport cannot be used afterwards."""


def device_of(device: torch.device | str) -> torch.device:
    """``device`` as a ``torch.device``.

    Raises:
        PipelineError: if torch does not know it.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PipelineError(
            "device must be one that torch has here", got=repr(device), fix='pass "cpu" or "cuda"'
        ) from error
