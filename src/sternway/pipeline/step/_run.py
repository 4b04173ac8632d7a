"""One rank's part of a step: its actions in order, as a generator that yields what it waits for and what it sends.

The generator holds no transport. Whoever drives it answers each ``Receive`` with a payload and takes each ``Send``. So
the same code runs over torch.distributed (one rank in each process) and in one process (all ranks in turn).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sternway._torch.failures import failure_of
from sternway.errors import PipelineError
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._random import python_seed, seed_forward
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.step._times import Spans, StreamTimes
from sternway.pipeline.transport._payload import Payload, pack
from sternway.pipeline.transport._routes import MessageKey, RankProgram, Receive, Routes, Send
from sternway.schedule import Action, Schedule, Upkeep

_SHARED = (
    "make every value in the forward of its microbatch: the graph of what is made once, as of a weight that a module "
    "caches, is freed by the backward of the first one"
)


@dataclass(frozen=True, slots=True)
class RankStep:
    """What one rank needs for one step.

    ``times`` gets one more (start, end) with each action done and sent, and ``stream_times`` a mark at its start and at
    its end: a GPU sends beside what it computes.
    The random numbers of each F in training begin with ``seed``. ``on_weights_done`` is called with a stage after its
    last W.
    """

    schedule: Schedule
    rank: int
    stages: dict[int, Stage]
    routes: Routes
    microbatches: list[Microbatch]
    training: bool
    seed: int
    device: torch.device
    keep_outputs: bool
    on_weights_done: Callable[[Stage], None]
    times: Spans
    stream_times: StreamTimes | None = None


def run_rank(step: RankStep) -> RankProgram:
    """Run the rank's actions.

    Raises:
        PipelineError: whatever went wrong in an action, with rank, stage and action.
    """
    left = dict.fromkeys(step.stages, len(step.microbatches))
    moved = step.schedule.moved(step.rank) if step.training else frozenset()
    for index, planned in enumerate(step.schedule.actions[step.rank]):
        if isinstance(planned, Upkeep):
            _run_upkeep(step, index, planned)
            continue
        arrived: dict[MessageKey, Payload] = {}
        actions = [action for action in planned.actions if step.training or action.op == "F"]
        for action in actions:
            for key in step.routes.received(action):
                arrived[key] = yield Receive(key)
        start = time.perf_counter()
        if step.stream_times is not None:
            step.stream_times.mark()
        made: list[Send] = []
        for action in actions:
            try:
                made += _run_action(step, action, arrived, (action.stage, action.microbatch) in moved)
            except Exception as error:
                raise _located(step, index, action, error) from error
            if action.op in "WB":
                left[action.stage] -= 1
                if not left[action.stage]:
                    step.on_weights_done(step.stages[action.stage])
        if step.stream_times is not None:
            step.stream_times.mark()
        while made:
            yield made.pop(0)  # whoever takes it says how long it is kept
        step.times.append((start, time.perf_counter()))  # with what it takes this rank to send, on a CPU


def _run_action(step: RankStep, action: Action, arrived: dict[MessageKey, Payload], moved: bool) -> list[Send]:
    stage, i = step.stages[action.stage], action.microbatch
    payloads = {key.channel: arrived[key] for key in step.routes.received(action)}
    if action.op == "W":
        stage.backward_weight(i)
        return []
    if action.op == "F":
        if step.training:
            seed_forward(step.seed, action.stage, i, step.device)
        if isinstance(stage.module, ModelPart):
            stage.module.sternway_python_seed = python_seed(step.seed, i)
        with torch.set_grad_enabled(step.training):
            made = stage.forward(i, step.microbatches[i], payloads, step.keep_outputs, moved)
        missing = {key.channel for key in step.routes.sent(action)} ^ made.keys()
        if missing:
            raise PipelineError(
                f"stage {stage.index} must return what its channels send: {sorted(step.routes.out_of(stage.index))}",
                got=f"{sorted(made)}",
                fix="return WithSkips(output, {name: tensor}) for each skip that starts there, and name it in skips=",
            )
        return [Send(key, made[key.channel]) for key in step.routes.sent(action)]
    grads = {name: tensors for name, (_, tensors) in payloads.items()}
    found = stage.backward_input(i, grads) if action.op == "I" else stage.backward(i, grads)
    return [Send(key, pack(found[key.channel])) for key in step.routes.sent(action)]


def _run_upkeep(step: RankStep, index: int, upkeep: Upkeep) -> None:
    """Gather, free or reduce what a stage has sharded, or move what a microbatch keeps.

    Without a backward there is nothing to reduce, and nothing is kept. What goes on beside the host has a length if the
    host waits for it.
    """
    start, place = time.perf_counter(), len(step.times)
    if step.stream_times is not None:
        step.stream_times.mark(twice=True)
    stage = step.stages[upkeep.stage]

    times = step.times  # not the step, which has the batch

    def noted(end: float) -> None:
        times[place] = start, end

    try:
        if upkeep.microbatch is not None:
            if step.training and stage.movers is not None:
                mover = stage.movers.of(upkeep.microbatch)
                mover.put_away() if upkeep.op == "OFFLOAD" else mover.bring_back()
        elif stage.shards is not None and (step.training or upkeep.op != "REDUCE_GRAD"):
            stage.shards.run(upkeep.op, noted)
    except Exception as error:
        raise _located(step, index, upkeep, error) from error
    step.times.append((start, start if upkeep.op == "UNSHARD" else time.perf_counter()))


def _located(step: RankStep, index: int, action: Action | Upkeep, error: Exception) -> PipelineError:
    return PipelineError(
        f"{action} failed (rank {step.rank}, stage {action.stage}, action {index} of the rank)",
        got=f"{type(error).__name__}: {error}",
        fix=_SHARED if failure_of(error) == "twice" else "see the traceback of that rank",
    )
