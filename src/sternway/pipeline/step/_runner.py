"""Runs the steps of a pipeline: agree with the other ranks, drive the schedule, collect the results.

    begin   cut the batch; tell the other ranks what is coming, and whether the last optimizer step was fine
    run     drive the program of each rank of this process (``_run.py``) over the transport
    finish  complete the gradients (``_grads.py``), collect loss, outputs and times

It also holds what may follow a step: an optimizer step on trial, and the search for the module that made gradients
infinite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sternway.errors import NonfiniteError, PipelineError
from sternway.pipeline.faults import _nonfinite
from sternway.pipeline.faults._nonfinite import OnNonfinite
from sternway.pipeline.faults._report import Progress
from sternway.pipeline.faults._trial import Trial, check_all_or_none
from sternway.pipeline.step._batch import Batch, shapes_checksum
from sternway.pipeline.step._grads import Gradients
from sternway.pipeline.step._guard import Guard
from sternway.pipeline.step._microbatch import ChunkSpec, Microbatch
from sternway.pipeline.step._result import StepResult, collect, gather_timeline
from sternway.pipeline.step._run import RankStep, run_rank
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.step._times import Spans, StreamTimes
from sternway.pipeline.transport._facts import StepFacts, checksum
from sternway.pipeline.transport._routes import Routes
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Schedule

RankTimes = dict[int, Spans]  # of each rank of this process


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What to do in a step besides running it; the arguments of ``Pipeline.step``."""

    training: bool
    loss_everywhere: bool
    return_outputs: bool
    record: bool = False
    nonfinite: OnNonfinite | None = None


class StepRunner:
    """Runs the steps of this process's stages. It owns a step from the cutting of the batch to the result.

    Attributes:
        steps: how many training steps were run.
        skipped: how many of them were dropped because gradients were not finite.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        routes: Routes,
        transport: Transport,
        ranks_here: Sequence[int],
        gradients: Gradients,
        guard: Guard,
        chunk: ChunkSpec,
        offsets: list[float],
        memory_after_i: float,
    ) -> None:
        self._stages, self._schedule, self._routes, self._transport = stages, schedule, routes, transport
        self._ranks_here, self._gradients, self._guard, self._chunk = ranks_here, gradients, guard, chunk
        self._offsets, self._memory_after_i = offsets, memory_after_i
        self._checksum = checksum(schedule.to_json())
        self._last: tuple[list[Microbatch], Tensor] | None = None  # the last training step: its batch, its random state
        self._trial: Trial | None = None
        self.steps, self.skipped = 0, 0

    def step(self, batch: Batch, options: StepOptions) -> StepResult:
        """Run one batch, forward and backward, or forward alone."""
        self._guard.check_open("another step")
        microbatches = self._begin(batch, options.training)
        timeline, fine = None, True
        with self._whole_step():
            times = self._run(microbatches, options.training, options.return_outputs, options.record)
            loss, outputs = collect(
                self._stages, self._schedule, self._transport, options.loss_everywhere, options.return_outputs
            )
            if options.record:
                timeline = gather_timeline(self._schedule, self._transport, times, self._offsets, self._memory_after_i)
            if options.nonfinite is not None:
                fine = self._all_finite()
        self.steps += options.training
        origin = None if fine or options.nonfinite is None else self._reject(options.nonfinite)
        return StepResult(loss, outputs, timeline, origin)

    def continue_from(self, step: int) -> None:
        """Count on from this step, after a checkpoint was loaded."""
        self.steps = step

    def _begin(self, batch: Batch, training: bool) -> list[Microbatch]:
        """Agree with the other ranks on the batch, and on the optimizer step before it."""
        while True:
            microbatches: list[Microbatch] = []

            def prepare(microbatches: list[Microbatch] = microbatches) -> StepFacts:
                microbatches += batch.cut(self._stages, self._schedule, self._chunk, training)
                return replace(self._facts(microbatches, training), square=self._square())

            with self._guard.other_ranks():
                facts = self._transport.exchange(prepare)
            check_one_schedule(facts, self._schedule)
            if self._confirm([each.square for each in facts]):
                return microbatches

    def _facts(self, microbatches: list[Microbatch], training: bool) -> StepFacts:
        modes = [stage.module.training for stage in self._stages.values()]
        return StepFacts(self._checksum, shapes_checksum(microbatches, modes), training)

    def _run(
        self, microbatches: list[Microbatch], training: bool, keep_outputs: bool = False, record: bool = False
    ) -> RankTimes:
        """Run every action of this process's ranks. Afterwards the gradients are complete.

        Returns:
            When the actions ran; on a GPU, if ``record``. Then the host waits for it.
        """
        random_state = torch.get_rng_state()
        times: RankTimes = {rank: [] for rank in self._ranks_here}
        device, first = self._transport.device, self._ranks_here[0]
        on_gpu = {rank: StreamTimes(device) for rank in times} if record and device.type == "cuda" else {}
        self._guard.follow(Progress(self.steps, first, self._schedule, times[first]))
        programs = {
            rank: run_rank(
                RankStep(
                    schedule=self._schedule,
                    rank=rank,
                    stages={index: self._stages[index] for index in self._schedule.placement[rank]},
                    routes=self._routes,
                    microbatches=microbatches,
                    training=training,
                    keep_outputs=keep_outputs,
                    on_weights_done=self._gradients.stage_done,
                    times=times[rank],
                    stream_times=on_gpu.get(rank),
                )
            )
            for rank in self._ranks_here
        }
        if training:
            self._gradients.begin()
        self._transport.drive(programs, self._schedule, self._routes, training)
        if training:
            self._gradients.finish()
            self._last = microbatches, random_state
        return {rank: marks.read() for rank, marks in on_gpu.items()} or times

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        try:
            with self._guard.whole_step():
                yield
        finally:
            for stage in self._stages.values():
                stage.clear()

    # Optimizer steps on trial

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, on_nonfinite: OnNonfinite
    ) -> None:
        """Take an optimizer step on trial."""
        self.settle()
        self._trial = Trial(optimizer, self._gradients.square_norm(), max_norm, on_nonfinite)

    def settle(self) -> None:
        """If an optimizer step is on trial, agree on it now."""
        if self._trial is not None:
            with self._guard.other_ranks():
                squares = self._transport.crew().share(self._square())
            self._confirm(squares)

    def _square(self) -> float | None:
        return None if self._trial is None else self._trial.square

    def _confirm(self, squares: Sequence[float | None]) -> bool:
        """Keep or undo the optimizer step on trial.

        Returns:
            False if it was undone. Then the batch before was run once more, and the caller must exchange facts again.
        """
        trial, self._trial = self._trial, None
        check_all_or_none(squares)
        if trial is None or trial.settle(squares):
            return True
        self._reject(trial.on_nonfinite)
        return False

    # Gradients that are not finite

    def _all_finite(self) -> bool:
        """Whether the gradients are finite on every rank."""
        mine = bool(torch.isfinite(self._gradients.square_norm()))
        rows = self._transport.gather([[float(mine)]] * len(self._ranks_here))
        return all(row[0] for row in rows)

    def _reject(self, on_nonfinite: OnNonfinite) -> str:
        """Drop a step's gradients; raise, or return where they stopped being finite. All ranks call it together."""
        origin = self._origin()
        self._gradients.drop()
        self.skipped += 1
        if on_nonfinite == "raise":
            error = NonfiniteError(
                f"the gradients of step {self.steps - 1} are not finite",
                got=origin,
                fix='lower the learning rate, correct the module, or pass nonfinite="skip"',
            )
            self._guard.leave_report(error)
            raise error
        return origin

    def _origin(self) -> str:
        """Run the last step once more, and look where values stop being finite."""
        assert self._last is not None
        microbatches, random_state = self._last
        modules = {index: stage.module for index, stage in self._stages.items()}
        rank_of, last = self._schedule.stage_ranks(), self._schedule.num_stages - 1
        by_gradient = _nonfinite.in_gradients(modules, rank_of)
        self._gradients.drop()
        now = torch.get_rng_state()
        with self._whole_step(), _nonfinite.looking(modules, rank_of) as found:
            self._transport.exchange(lambda: self._facts(microbatches, True))
            torch.set_rng_state(random_state)
            self._run(microbatches, True)
            torch.set_rng_state(now)
            if last in self._stages:
                found += _nonfinite.in_losses(self._stages[last].losses.values(), last, rank_of[last])
            found += by_gradient or _nonfinite.in_gradients(modules, rank_of)
        everyone = [origin for row in self._transport.crew().share(found) for origin in row]
        first = _nonfinite.first(everyone)
        return str(first) if first is not None else "a sum that is not finite, of gradients that each are"


def check_one_schedule(facts: list[StepFacts], schedule: Schedule) -> None:
    """Raise unless all ranks have the same schedule."""
    other = next((rank for rank, each in enumerate(facts) if each.schedule != facts[0].schedule), None)
    if other is not None:
        raise PipelineError(
            "all ranks must run the same schedule",
            got=f"another on rank {other} than on rank 0; here it is {schedule.name} of {schedule.n_microbatches}",
            fix="build the pipeline from the same arguments on every rank",
        )
