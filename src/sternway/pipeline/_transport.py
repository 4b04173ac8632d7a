"""How messages travel between ranks. Two ways: all ranks in one process, or one rank a process.

A transport drives the ranks' coroutines (``_run.py``): it answers what they wait for and takes what they send. It also
does the little that concerns all ranks at once: agree on a step's facts, add numbers up, bring times together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline._crew import Crew
from sternway.pipeline._run import Receive, Routes, Slot, Work
from sternway.pipeline._stage import Payload
from sternway.pipeline._watch import Watch
from sternway.schedule import Schedule


class Transport(ABC):
    """Whatever carries a pipeline's messages."""

    ranks: int
    """How many ranks the pipeline has; 0 where the schedule decides."""
    mine: tuple[int, ...]
    """The ranks that this process runs."""
    device: torch.device
    watch: Watch | None = None
    """Looks for ranks that are lost, where that can be."""

    @abstractmethod
    def drive(self, works: dict[int, Work], schedule: Schedule, routes: Routes, training: bool) -> None:
        """Run the coroutines of this process's ranks to their end."""

    @abstractmethod
    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        """Every rank's row of numbers, given this process's ranks' rows; all rows are of one length."""

    @abstractmethod
    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        """Replace tensors by their sum over ``ranks``, in place; called by those ranks only."""

    @abstractmethod
    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Overwrite ``tensor`` on ``ranks`` by what ``source`` has; called by those ranks only."""

    @abstractmethod
    def checked(self, prepare: Callable[[], list[float]]) -> list[list[float]]:
        """Every rank's facts about the coming step; if ``prepare`` raises on one rank, all ranks raise."""

    def delay(self, nbytes: int) -> float:
        """Seconds that a message of so many bytes takes from one rank to another; all ranks ask together."""
        return 0.0

    @abstractmethod
    def crew(self) -> Crew:
        """The pipeline's processes, for what they decide together between steps."""

    @abstractmethod
    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        """The pipeline's processes, or these, with a group of their own: for a thread that works beside the steps."""

    def group_like(self, group: Any) -> Any:
        """A process group of the same ranks, which is woken and given back with the pipeline's own."""
        return group

    @abstractmethod
    def explain(self, error: Exception) -> PipelineError:
        """A connection was lost: which rank was it?"""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on. The transport is of no use afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was opened for the pipeline."""


@final
class LocalTransport(Transport):
    """All ranks in one process, in turn: deterministic, for tests and for finding mistakes.

    Example:
        >>> from sternway import pipeline
        >>> stages = {0: torch.nn.Linear(4, 4), 1: torch.nn.Linear(4, 4)}
        >>> pipe = pipeline.Pipeline(stages, schedule="zb-h1", n_microbatches=2, ranks=2,
        ...                          loss_fn=torch.nn.functional.mse_loss, transport=pipeline.LocalTransport())
        >>> result = pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.ranks, self.mine = 0, ()
        self.device = device_of(device)

    def drive(self, works: dict[int, Work], schedule: Schedule, routes: Routes, training: bool) -> None:
        mail: dict[Slot, Payload] = {}
        waiting: dict[int, Slot | None] = dict.fromkeys(works)
        while waiting:
            moved = False
            for rank, slot in list(waiting.items()):
                if slot is not None and slot not in mail:
                    continue
                moved = True
                wanted = _advance(works[rank], mail.pop(slot) if slot is not None else None, mail)
                if wanted is None:
                    del waiting[rank]
                else:
                    waiting[rank] = wanted
            if not moved:
                raise PipelineError(
                    "every message that a rank waits for is sent",
                    got=", ".join(f"rank {rank} waits for {slot}" for rank, slot in waiting.items()),
                    fix="call schedule.check(), which names the cause",
                )

    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        return [list(row) for row in numbers]

    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        """Nothing to do: whoever calls has every rank's tensors, and has added them."""

    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Nothing to do: there is one process."""

    def checked(self, prepare: Callable[[], list[float]]) -> list[list[float]]:
        return [prepare()]

    def crew(self) -> Crew:
        return Crew()

    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        return Crew()

    def explain(self, error: Exception) -> PipelineError:
        return PipelineError("a step succeeds", got=f"{type(error).__name__}: {error}", fix="see the traceback")

    def fail(self, error: BaseException) -> None:
        """Nobody else to tell."""

    def close(self) -> None:
        """Nothing was opened."""


def device_of(device: torch.device | str) -> torch.device:
    """The device that is meant.

    Raises:
        PipelineError: none that torch knows.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PipelineError(
            "a device is one of torch's", got=str(error).splitlines()[0], fix='pass "cpu" or "cuda"'
        ) from None


def _advance(work: Work, answer: Payload | None, mail: dict[Slot, Payload]) -> Slot | None:
    """Run one rank until it waits for something that is not there; what that is, or None at its end."""
    try:
        request = next(work) if answer is None else work.send(answer)
        while True:
            if isinstance(request, Receive):
                if request.slot not in mail:
                    return request.slot
                request = work.send(mail.pop(request.slot))
            else:
                mail[request.slot] = request.payload
                request = next(work)
    except StopIteration:
        return None
