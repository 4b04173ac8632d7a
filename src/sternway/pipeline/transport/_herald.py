"""Tells every rank what the first one says about a step, from rank to rank in the order of their stages.

    rank 0   cut the batch ─ facts ─▶ F0 F1 F2 …          waits for nobody
    rank 1            facts ─▶ F0 F1 …                    waits for rank 0, as its first F does anyway
    rank 2                    facts ─▶ F0 …

Whoever gets the facts passes them on before it looks at them, so that all ranks hear of a mistake on the first one:
then nobody has begun, and the pipeline can be used again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sternway.errors import PipelineError
from sternway.pipeline.transport._facts import StepFacts
from sternway.pipeline.transport._groups import ProcessGroups
from sternway.pipeline.transport._sends import Sends
from sternway.schedule import Schedule

_TAG = 1  # no other message between two ranks of the control group has it
_LENGTH = len(StepFacts().to_numbers()) + 1

NOTICE_BYTES = 8 * _LENGTH
"""What a rank tells the next one in its line; it holds that until the end of the step."""


def line_of(schedule: Schedule) -> list[int]:
    """The ranks in the order in which they hear of a step."""
    return sorted(range(schedule.ranks), key=lambda rank: min(schedule.placement[rank]))


class Herald:
    """One rank's place in the line of ranks."""

    def __init__(self, groups: ProcessGroups, schedule: Schedule) -> None:
        line = line_of(schedule)
        place = line.index(groups.rank)
        self._groups = groups
        self._before = line[place - 1] if place else None
        self._after = line[place + 1] if place + 1 < len(line) else None
        self._sends = Sends(groups)

    def announce(self, prepare: Callable[[], StepFacts]) -> StepFacts:
        """What the first rank says about the step, where ``prepare`` is called.

        Raises:
            PipelineError: on every rank, if ``prepare`` raises. Nobody has begun then.
        """
        if self._before is None:
            return self._begin(prepare)
        length, *numbers = self._receive(torch.empty(_LENGTH, dtype=torch.int64)).tolist()
        text = self._receive(torch.empty(length, dtype=torch.uint8)) if length else None
        self._pass_on([length, *numbers], text)
        if text is not None:
            cause = text.numpy().tobytes().decode()
            raise PipelineError("another rank could not begin", got=cause, fix="remove the cause on that rank")
        return StepFacts.from_numbers(numbers)

    def finish(self) -> None:
        """The step is done: the next rank has heard of it by now, or will in a moment."""
        self._sends.finish()

    def _begin(self, prepare: Callable[[], StepFacts]) -> StepFacts:
        try:
            facts = prepare()
        except Exception as error:
            text = f"rank {self._groups.rank}: {type(error).__name__}: {error}".encode()
            message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._pass_on([len(text), *StepFacts().to_numbers()], message)
            raise
        self._pass_on([0, *facts.to_numbers()], None)
        return facts

    def _receive(self, tensor: Tensor) -> Tensor:
        assert self._before is not None
        self._groups.attempt(self._post(dist.irecv, tensor, self._before).wait)
        return tensor

    def _pass_on(self, numbers: list[int], text: Tensor | None) -> None:
        if self._after is not None:
            for tensor in (torch.tensor(numbers, dtype=torch.int64), text):
                if tensor is not None:
                    self._sends.add(self._post(dist.isend, tensor, self._after), tensor)

    def _post(self, call: Any, tensor: Tensor, other: int) -> Any:
        members, group = self._groups.members, self._groups.control
        return self._groups.attempt(call, tensor, members[other], group=group, tag=_TAG)
