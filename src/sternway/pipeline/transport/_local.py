"""All ranks in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._crew import Crew
from sternway.pipeline.transport._facts import StepFacts
from sternway.pipeline.transport._later import Rows
from sternway.pipeline.transport._payload import Payload
from sternway.pipeline.transport._routes import MessageKey, RankProgram, Receive, Routes
from sternway.pipeline.transport._transport import Transport, device_of
from sternway.schedule import Schedule


@final
class LocalTransport(Transport):
    """Runs all ranks in one process, in turn. Deterministic: for tests and debugging.

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

    def place(self, devices: Sequence[torch.device]) -> None:
        self.device = devices[0] if len(devices) == 1 else self.device

    def connect(self, schedule: Schedule, routes: Routes) -> None:
        """Nothing to do: messages stay in the process."""

    def drive(self, programs: dict[int, RankProgram], facts: StepFacts) -> None:
        mail: dict[MessageKey, Payload] = {}
        waiting: dict[int, MessageKey | None] = dict.fromkeys(programs)
        while waiting:
            moved = False
            for rank, key in list(waiting.items()):
                if key is not None and key not in mail:
                    continue
                moved = True
                wanted = _advance(programs[rank], mail.pop(key) if key is not None else None, mail)
                if wanted is None:
                    del waiting[rank]
                else:
                    waiting[rank] = wanted
            if not moved:
                raise PipelineError(
                    "the schedule deadlocks: ranks wait for messages that no rank sends",
                    got=", ".join(f"rank {rank} waits for {key}" for rank, key in waiting.items()),
                    fix="call schedule.check(), which names the cause",
                )

    def announce(self, prepare: Callable[[], StepFacts]) -> StepFacts:
        return prepare()

    def gather(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        return [list(row) for row in numbers]

    def gather_later(self, numbers: Callable[[], Rows], members: Sequence[int] | None = None) -> Callable[[], Rows]:
        return functools.cache(numbers)

    def hear_later(self, said: bytes, members: Sequence[int] | None = None) -> Callable[[], bytes]:
        return lambda: said

    def add(self, tensors: list[Tensor], ranks: Sequence[int]) -> None:
        """Nothing to do: the caller has the tensors of all ranks, and has added them."""

    def copy_from(self, tensor: Tensor, source: int, ranks: Sequence[int]) -> None:
        """Nothing to do: there is one process."""

    def crew(self) -> Crew:
        return Crew()

    def crew_apart(self, members: Sequence[int] | None = None) -> Crew:
        return Crew()

    def collective(self, members: Sequence[int]) -> Collective:
        raise PipelineError("a mesh needs one process for each rank", got="LocalTransport()", fix="pass no transport")

    def explain(self, error: Exception) -> PipelineError:
        return PipelineError("a step failed", got=f"{type(error).__name__}: {error}", fix="see the traceback")

    def fail(self, error: BaseException) -> None:
        """Nothing to do: there are no other processes."""

    def close(self) -> None:
        """Nothing to do: nothing was opened."""


def _advance(program: RankProgram, answer: Payload | None, mail: dict[MessageKey, Payload]) -> MessageKey | None:
    """Run one rank until it waits for a message that is not there yet; its key, or None at the end."""
    try:
        request = next(program) if answer is None else program.send(answer)
        while True:
            if isinstance(request, Receive):
                if request.key not in mail:
                    return request.key
                request = program.send(mail.pop(request.key))
            else:
                mail[request.key] = request.payload
                del request  # the program goes on, and the message may be taken before it sends the next one
                request = next(program)
    except StopIteration:
        return None
