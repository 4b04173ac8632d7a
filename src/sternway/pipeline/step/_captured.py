"""Stages whose F, I and W are CUDA graphs: ``Pipeline(…, cuda_graphs=True)``.

The schedule says how many microbatches a stage has in flight at most, and so how many sets of graphs it needs. What
arrives is copied into the set's own memory.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from sternway import split
from sternway._torch.cuda_graphs import all_modules
from sternway.pipeline.forward._part import ModelPart
from sternway.schedule import Schedule


def in_flight(schedule: Schedule, stage: int) -> int:
    """How many microbatches are between the start of F and the end of W of a stage, at most.

    Example:
        >>> from sternway import schedule
        >>> in_flight(schedule.make("gpipe", ranks=2, microbatches=3), 0)
        3
    """
    now = most = 0
    for step in schedule.actions[schedule.stage_ranks()[stage]]:
        for action in step.actions:  # of an overlapped pair, the forward comes first
            if action.stage == stage:
                now += {"F": 1, "W": -1, "B": -1}.get(action.op, 0)
                most = max(most, now)
    return most


class PartCall(nn.Module):
    """A stage of a whole model as a module to capture: what it leaves in an attribute is returned, too."""

    def __init__(self, part: ModelPart) -> None:
        super().__init__()
        self.part = part

    @property
    def runs_inside(self) -> list[nn.Module]:
        """The modules of the whole model: its code between the pieces runs in every stage."""
        return all_modules(self.part.model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's result, and the weight of the microbatch in the model's own loss."""
        return self.part(*args, **kwargs), self.part.sternway_weight


class CapturedStage:
    """Calls the module of a stage, as CUDA graphs where it can be."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self._index, self._part = index, module if isinstance(module, ModelPart) else None
        self._captured = split.Captured(module if self._part is None else PartCall(self._part), in_flight=1)
        self._warned: list[str] = []

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why calls ran without graphs, each reason once."""
        return (*self._captured.refusals, *self._warned)

    @property
    def sets(self) -> int:
        """How many sets of graphs are captured now."""
        return self._captured.sets

    def plan_for(self, schedule: Schedule) -> None:
        """Have as many sets as this schedule needs, and those before it."""
        self._captured.in_flight = max(self._captured.in_flight, in_flight(schedule, self._index))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part = self._part
        if part is None:
            return self._captured(*args, **kwargs)
        if not self._can_capture(part, args):
            return part(*args, **kwargs)
        part.look_outside()  # a replay runs no code that would
        result, part.sternway_weight = self._captured(*args, **kwargs)
        return result

    def _can_capture(self, part: ModelPart, args: tuple[Any, ...]) -> bool:
        """Whether the stage is as its graphs were captured, in what they cannot know themselves."""
        crossing = part.crossing_of(args)
        if crossing is None:  # nothing is known before the first batch was looked at
            return False
        if not part.expects_gradients(crossing):
            self._warn("it sends a value that no gradient comes back for")
            return False
        if crossing.draws_python:  # from a seed that is put back, so that nobody sees it
            self._warn("code between its modules draws random numbers of Python, which a replay would repeat")
            return False
        return True

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.append(reason)
            warnings.warn(f"stage {self._index} runs as it is, without CUDA graphs: {reason}", stacklevel=5)
