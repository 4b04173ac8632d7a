"""One rank's share of a step: its actions in order, as a coroutine that says what it waits for and what it sends.

The coroutine holds no transport. Whoever drives it answers each ``Receive`` with a payload and takes each ``Send``; so
the same code runs over torch.distributed (one rank a process) and in one process (all ranks in turn).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from sternway.errors import PipelineError
from sternway.pipeline._payload import pack
from sternway.pipeline._stage import MAIN, Microbatch, Payload, Stage
from sternway.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class Slot:
    """One message: what stage ``source`` makes for stage ``target`` from one microbatch, on one channel.

    An activation goes to a later stage, a gradient to an earlier one.
    """

    channel: str
    source: int
    target: int
    microbatch: int

    @property
    def back(self) -> Slot:
        """The message that answers this one: an activation's gradient, and the other way round."""
        return Slot(self.channel, self.target, self.source, self.microbatch)


@dataclass(frozen=True, slots=True)
class Receive:
    slot: Slot


@dataclass(frozen=True, slots=True)
class Send:
    slot: Slot
    payload: Payload


@dataclass(frozen=True, slots=True)
class Routes:
    """Which channels lead from which stage to which: the main one, and the skips."""

    num_stages: int
    skips: dict[str, tuple[int, int]]

    def into(self, stage: int) -> dict[str, int]:
        """The channels that end at ``stage``, with where they come from."""
        main = {MAIN: stage - 1} if stage else {}
        return main | {name: source for name, (source, target) in self.skips.items() if target == stage}

    def out_of(self, stage: int) -> dict[str, int]:
        """The channels that start at ``stage``, with where they lead."""
        main = {MAIN: stage + 1} if stage + 1 < self.num_stages else {}
        return main | {name: target for name, (source, target) in self.skips.items() if source == stage}

    def received(self, action: Action) -> list[Slot]:
        """What an action waits for."""
        i = action.microbatch
        if action.op == "F":
            return [Slot(name, source, action.stage, i) for name, source in self.into(action.stage).items()]
        if action.is_backward:
            return [Slot(name, target, action.stage, i) for name, target in self.out_of(action.stage).items()]
        return []

    def sent(self, action: Action) -> list[Slot]:
        """What an action sends."""
        i = action.microbatch
        if action.op == "F":
            return [Slot(name, action.stage, target, i) for name, target in self.out_of(action.stage).items()]
        if action.is_backward:
            return [Slot(name, action.stage, source, i) for name, source in self.into(action.stage).items()]
        return []


@dataclass(slots=True)
class Step:
    """What one rank needs for one step."""

    schedule: Schedule
    rank: int
    stages: dict[int, Stage]
    routes: Routes
    microbatches: list[Microbatch]
    training: bool
    keep_outputs: bool
    on_weights_done: Callable[[Stage], None]  # after a stage's last W


Work = Generator[Receive | Send, Payload, None]


def run_rank(step: Step, times: list[tuple[float, float]]) -> Work:
    """Run the rank's actions; append each one's start and end to ``times``.

    Raises:
        PipelineError: whatever went wrong, with rank, stage and action.
    """
    left = dict.fromkeys(step.stages, len(step.microbatches))
    for index, planned in enumerate(step.schedule.actions[step.rank]):
        arrived: dict[Slot, Payload] = {}
        actions = [action for action in planned.actions if step.training or action.op == "F"]
        for action in actions:
            for slot in step.routes.received(action):
                arrived[slot] = yield Receive(slot)
        start = time.perf_counter()
        made: list[Send] = []
        for action in actions:
            try:
                made += _run_action(step, action, arrived)
            except Exception as error:
                raise _located(step, index, action, error) from error
            if action.op in "WB":
                left[action.stage] -= 1
                if not left[action.stage]:
                    step.on_weights_done(step.stages[action.stage])
        times.append((start, time.perf_counter()))
        yield from made


def _run_action(step: Step, action: Action, arrived: dict[Slot, Payload]) -> list[Send]:
    stage, i = step.stages[action.stage], action.microbatch
    payloads = {slot.channel: arrived[slot] for slot in step.routes.received(action)}
    if action.op == "W":
        stage.backward_weight(i)
        return []
    if action.op == "F":
        with torch.set_grad_enabled(step.training):
            made = stage.forward(i, step.microbatches[i], payloads, step.keep_outputs)
        missing = {slot.channel for slot in step.routes.sent(action)} ^ made.keys()
        if missing:
            raise PipelineError(
                f"stage {stage.index} makes what its channels send on: {sorted(step.routes.out_of(stage.index))}",
                got=f"{sorted(made)}",
                fix="return WithSkips(output, {name: tensor}) for each skip that starts there, and name it in skips=",
            )
        return [Send(slot, made[slot.channel]) for slot in step.routes.sent(action)]
    grads = {name: tensors for name, (_, tensors) in payloads.items()}
    found = stage.backward_input(i, grads) if action.op == "I" else stage.backward(i, grads)
    return [Send(slot, pack(found[slot.channel])) for slot in step.routes.sent(action)]


def _located(step: Step, index: int, action: Action, error: Exception) -> PipelineError:
    return PipelineError(
        f"every action of a step succeeds; {action} did not (rank {step.rank}, stage {action.stage}, step {index})",
        got=f"{type(error).__name__}: {error}",
        fix="mend the cause, which is in the traceback of that rank",
    )
