"""Real steps with the sample, before training: which way to cut the model is faster in truth?

A profile knows what stages cost alone. It does not know what messages cost while all ranks compute and send, and a
model with two stages on each rank sends twice as many. Stages cannot move between ranks later, so this is the time to
find out. Gradients, buffers and random numbers are afterwards what they were before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sternway import schedule as schedules
from sternway._tree import replace_leaves
from sternway.pipeline.build._partition import arguments_of
from sternway.pipeline.build._profile import own_gradients, total_loss
from sternway.pipeline.build._room import Room
from sternway.pipeline.build._sample_loss import sample_loss
from sternway.pipeline.forward._part import with_models
from sternway.pipeline.forward._record import sample_runs
from sternway.pipeline.forward._untouched import untouched
from sternway.pipeline.step._microbatch import Microbatch
from sternway.pipeline.step._random import own_random_numbers
from sternway.pipeline.step._result import gather_timeline
from sternway.pipeline.step._run import RankStep, run_rank
from sternway.pipeline.step._stage import LossFn, Stage
from sternway.pipeline.step._times import Spans, StreamClock, StreamTimes
from sternway.pipeline.transport._clock import clock_offsets
from sternway.pipeline.transport._facts import StepFacts, checksum
from sternway.pipeline.transport._routes import Routes
from sternway.pipeline.transport._transport import Transport
from sternway.saved import Offload
from sternway.schedule import Costs, Schedule, Timeline, candidates, measured_costs

_STEPS = 3  # the first loads kernels and allocates memory; of the others, the shorter counts


class Rehearsal:
    """Runs steps of a whole model over a transport, with the sample as every microbatch. All ranks do it together.

    The sample and its target are those of the first rank. Without a target, the loss is the sum of the outputs. With
    ``everyone``, the processes of several pipelines, all of them run by the schedules of the first: what is sharded
    over them computes together.
    """

    def __init__(
        self,
        transport: Transport,
        sample: Any,
        target: Any,
        loss_fn: LossFn | None,
        everyone: Sequence[int] | None = None,
        offload: Callable[[], Offload] | None = None,
    ) -> None:
        self._transport, device, self._offload = transport, transport.device, offload
        self._everyone = None if everyone is None else transport.crew_apart(everyone)
        shared = transport.crew().share(_moved(target, torch.device("cpu")) if transport.mine == (0,) else None)[0]
        arguments, keywords = arguments_of(sample) if sample is not None else ((), {})
        goal = 0 if shared is None else _moved(shared, device)
        self._microbatch = Microbatch(arguments, keywords, target=goal)
        self._loss_fn = loss_fn if shared is not None and loss_fn is not None else total_loss
        self._offsets = clock_offsets(transport, transport.ranks or 1)
        self._clock = StreamClock(device) if device.type == "cuda" else None
        self._count = 0  # of ways to cut that were run

    def span(
        self,
        parts: Mapping[int, nn.Module],
        schedule: Schedule,
        costs: Costs,
        memory_limit: float | Sequence[float],
        room: Room | None = None,
        gathered: int | None = None,
    ) -> float:
        """The seconds of a step among others, once the order fits what the stages cost in it.

        Args:
            parts: this rank's stages.
            schedule: the first plan for them.
            costs: those that it was made for.
            memory_limit: of the plan that follows from what is measured.
            room: its bytes, if they are limited.
            gathered: how many sharded stages a rank keeps gathered; all by default.
        """
        self._count += 1
        here = [index for index, part in parts.items() if any(isinstance(each, FSDPModule) for each in part.modules())]
        held = {index for row in self._transport.crew().share(here) for index in row}
        with self._unchanged(parts) as loss_fn:
            planned = schedules.sharded(schedule, stages=held, gathered=gathered)
            first = self._run(parts, planned, loss_fn)
            measured = measured_costs(first, costs)
            fits = None if room is None else room.rank_fits
            crew = self._everyone or self._transport.crew()
            better = crew.from_first(  # a search on every rank would take what the others need
                lambda: candidates(planned, measured, memory_limit=memory_limit, count=1, fits=fits, gathered=gathered)
            )[0]
            return min(first.span, self._run(parts, better, loss_fn).span)

    def _run(self, parts: Mapping[int, nn.Module], schedule: Schedule, loss_fn: LossFn) -> Timeline:
        last = schedule.num_stages - 1
        stages = {
            index: Stage(
                index,
                part,
                is_last=index == last,
                loss_fn=loss_fn if index == last else None,
                offload=self._offload,
            )
            for index, part in parts.items()
        }
        routes = Routes(schedule.num_stages, {})
        self._transport.connect(schedule, routes)
        facts = StepFacts(training=True, shapes=checksum(f"way {self._count} to cut"))  # messages look otherwise
        runs = [self._step(stages, schedule, routes, facts) for _ in range(_STEPS)]
        for stage in stages.values():
            stage.close()
        return min(runs[1:], key=lambda timeline: timeline.span)

    def _step(self, stages: dict[int, Stage], schedule: Schedule, routes: Routes, facts: StepFacts) -> Timeline:
        (rank,), device = self._transport.mine, self._transport.device
        times: Spans = []
        on_gpu = None if self._clock is None else StreamTimes(self._clock)
        program = run_rank(
            RankStep(
                schedule=schedule,
                rank=rank,
                stages=stages,
                routes=routes,
                microbatches=[self._microbatch] * schedule.n_microbatches,
                training=True,
                seed=0,
                device=device,
                keep_outputs=False,
                on_weights_done=lambda stage: None,
                times=times,
                stream_times=on_gpu,
            )
        )
        with own_random_numbers(device):
            self._transport.drive({rank: program}, facts)
        for stage in stages.values():
            if stage.shards is not None:
                stage.shards.finish()
            stage.clear()
        read = gather_timeline(
            schedule,
            self._transport,
            lambda: {rank: times if on_gpu is None else on_gpu.read()},
            self._offsets,
            Costs(),
        )
        return read()

    @contextmanager
    def _unchanged(self, parts: Mapping[int, nn.Module]) -> Iterator[LossFn]:
        """A block that leaves the model and the loss as they were, with that loss; if a rank fails in it, all do."""
        modules = list(parts.values())
        try:
            changed = own_gradients(modules), untouched(*with_models(modules)), sample_loss(self._loss_fn, modules)
            with changed[0], changed[1], changed[2] as loss, sample_runs():
                yield loss or total_loss
        except BaseException as error:
            self._transport.fail(error)
            raise


def _moved(tree: Any, device: torch.device) -> Any:
    return replace_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)
