"""Runs the steps of a pipeline: drive the schedule, look whether the optimizer step before was right, collect results.

    begin    cut the batch; hear from the first rank what is coming (``transport/_facts.py``)
    run      drive the program of each rank of this process (``_run.py``) over the transport, complete the gradients
    confirm  the optimizer step before this step, if on trial; if it was wrong, undo it and run this step again
    finish   collect loss, outputs and times

No rank waits for a later one to begin. It also holds what may follow a step: an optimizer step on trial, and the search
for the module that made gradients infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sternway.errors import NonfiniteError
from sternway.pipeline.faults import _nonfinite
from sternway.pipeline.faults._nonfinite import OnNonfinite
from sternway.pipeline.faults._report import Progress
from sternway.pipeline.faults._trial import Trial, Verdict
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.step._batch import Batch, shapes_checksum
from sternway.pipeline.step._evaluation import joined
from sternway.pipeline.step._grads import Gradients
from sternway.pipeline.step._guard import Guard
from sternway.pipeline.step._microbatch import Chunk, ChunkSpec, Microbatch
from sternway.pipeline.step._random import own_random_numbers, step_seed
from sternway.pipeline.step._result import StepResult, collect_loss, gather_timeline
from sternway.pipeline.step._run import RankStep, run_rank
from sternway.pipeline.step._slices import Slices
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.step._state import StateBefore
from sternway.pipeline.step._times import RankTimes, StreamClock, StreamTimes
from sternway.pipeline.step._tuner import Tuner
from sternway.pipeline.transport._facts import StepFacts, checksum
from sternway.pipeline.transport._later import to_host
from sternway.pipeline.transport._routes import Routes
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What to do in a step besides running it; the arguments of ``Pipeline.step``."""

    training: bool
    loss_everywhere: bool
    return_outputs: bool
    record: bool = False
    nonfinite: OnNonfinite | None = None
    join: bool = False  # the outputs, along the batch

    def checksum(self) -> int:
        """A number that changes with what all ranks must agree on."""
        return checksum(repr((self.loss_everywhere, self.record, self.nonfinite)))


@dataclass(frozen=True, slots=True)
class _Work:
    """The batch of a step, and what all ranks were told about it."""

    microbatches: list[Microbatch]
    facts: StepFacts


class StepRunner:
    """Runs the steps of this process's stages. It owns a step from the cutting of the batch to the result.

    Attributes:
        schedule: that the last step was run by; before the next one, a tuner may change it.
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
        costs: Costs,
        tuner: Tuner | None = None,
        slices: Slices | None = None,
    ) -> None:
        self._stages, self.schedule, self._routes, self._transport = stages, schedule, routes, transport
        self._tuner, self._slices = tuner, slices
        self._ranks_here, self._gradients, self._guard, self._chunk = ranks_here, gradients, guard, chunk
        self._offsets, self._costs = offsets, costs
        self._clock = StreamClock(transport.device) if transport.device.type == "cuda" else None
        self._last: _Work | None = None  # of the last training step
        self._trial: Trial | None = None
        self._clips = False  # whether the last norm was too large
        self._writes: WeakKeyDictionary[torch.optim.Optimizer, bool | None] = WeakKeyDictionary()  # to gradients
        self._times: Callable[[], RankTimes] | None = None  # of the last training step, if it was recorded
        self.steps, self.skipped = 0, 0
        self._plan_graphs()

    def step(self, batch: Batch, options: StepOptions) -> StepResult:
        """Run one batch, forward and backward, or forward alone."""
        tuner = self._tuner if options.training else None
        call = "step" if options.training else "evaluate"
        self._guard.enter(call if tuner is None or not tuner.stopped else "step after stop_tuning")
        asked = options
        if tuner is not None:
            self._run_by(tuner.schedule)
            if tuner.stopped:
                tuner = None
            else:
                options = replace(options, record=options.record or tuner.looks)
        work = self._begin(batch, options)
        result = self._attempt(work, options)
        if result is None:  # the parameters were wrong; now they are right
            result = self._attempt(work, options)
            assert result is not None
        if options.training:
            self.steps, self._last = self.steps + 1, work
        if tuner is not None:
            with self._guard.other_ranks():
                tuner.note(result.measured if tuner.looks else None)
            result = result if asked.record else replace(result, measured=None)
        if options.nonfinite is None or result.nonfinite is None:
            return result
        return replace(result, nonfinite=self._reject(options.nonfinite))

    def _run_by(self, schedule: Schedule) -> None:
        """Run the next steps by another schedule of the same stages. All ranks do so before the same step."""
        if schedule is not self.schedule:
            with self._guard.other_ranks():
                self._transport.connect(schedule, self._routes)
            self.schedule = schedule
            self._plan_graphs()

    def _plan_graphs(self) -> None:
        for stage in self._stages.values():
            if stage.captured is not None:
                stage.captured.plan_for(self.schedule)

    def continue_from(self, step: int) -> None:
        """Count on from this step, after a checkpoint was loaded."""
        self.steps = step

    def _begin(self, batch: Batch, options: StepOptions) -> _Work:
        """Cut the batch, and hear from the first rank what is coming."""
        made: list[Microbatch] = []

        def prepare(rows: int) -> StepFacts:
            made.extend(self._cut(batch, options.training, rows))
            trial = 0 if self._trial is None else self._trial.checksum
            modes = [stage.module.training for stage in self._stages.values()]
            modes += [parameter.requires_grad for module in self._all_models() for parameter in module.parameters()]
            shapes, seed = shapes_checksum(made, modes), step_seed(self.steps)
            ends = {0, self.schedule.num_stages - 1}  # where the batch is from, and where the loss is computed
            wanted = ends & self._stages.keys()
            target = batch.target_checksum(self._chunk, rows, may_wait=not self.steps) if wanted else 0
            tunes = options.training and self._tuner is not None and not self._tuner.stopped
            return StepFacts(options.training, tunes, options.checksum(), trial, shapes, rows, seed, target)

        with self._guard.other_ranks():
            facts = self._transport.announce(lambda: prepare(batch.rows(self._chunk)))
        if not made:  # not the first rank, which has begun by now: a mistake ends the step for all
            with self._guard.whole_step():
                facts.check(prepare(facts.rows))
        return _Work(made, facts)

    def _cut(self, batch: Batch, training: bool, rows: int) -> list[Microbatch]:
        """The microbatches; where others have the rest of these sequences, once all have made theirs."""

        def made() -> list[Microbatch]:
            return batch.cut(self._stages, self.schedule, self._chunk, training, rows)

        return made() if self._slices is None else self._slices.agree(made, batch.shapes(training))

    def _all_models(self) -> list[nn.Module]:
        """Whole models, once each, and stages that were passed one by one. What others hold of a model is on meta."""
        modules = [stage.module for stage in self._stages.values()]
        whole = [module.model if isinstance(module, ModelPart) else module for module in modules]
        return list({id(module): module for module in whole}.values())

    def _attempt(self, work: _Work, options: StepOptions) -> StepResult | None:
        """Run a step, and confirm the optimizer step before it.

        Returns:
            None if that was wrong. It is put right then, and all is as if this step had not been run.
        """
        trial = self._trial
        with self._whole_step():
            before = None if trial is None else StateBefore(self._stages, work.microbatches)
            times = self._run(work, options.return_outputs, options.record)
            for stage in self._stages.values():
                stage.check_step()
            verdict = self._verdict()
            if before is None or verdict == "kept":
                return self._result(work, options, times)
            before.restore()
        if trial is not None and verdict == "nonfinite":
            self._reject(trial.on_nonfinite)
        return None

    def _result(self, work: _Work, options: StepOptions, times: Callable[[], RankTimes]) -> StepResult:
        stages, schedule, transport = self._stages, self.schedule, self._transport
        loss = collect_loss(stages, schedule, transport, self._slices, options.training, options.loss_everywhere)
        outputs = self._outputs(work, options, loss)
        measured = None
        if options.record:
            before = self._times if options.training else None
            measured = gather_timeline(schedule, transport, times, self._offsets, self._costs, before)
        self._times = times if options.training and options.record else None
        fine = options.nonfinite is None or self._all_finite()
        return StepResult(loss, outputs, None if fine else "somewhere", measured)

    def _outputs(self, work: _Work, options: StepOptions, loss: Tensor | None) -> Any:
        """The outputs of a step, if they were asked for and are here."""
        stage = self._stages.get(self.schedule.num_stages - 1)
        if not options.return_outputs or stage is None:
            return None
        outputs = [stage.outputs[i] for i in sorted(stage.outputs)]
        if not options.join or not isinstance(self._chunk, Chunk):
            return outputs
        rows = [microbatch.rows for microbatch in work.microbatches]
        return joined(outputs, rows, self._chunk.dim, stage.own_losses(), loss)

    def _run(self, work: _Work, keep_outputs: bool = False, record: bool = False) -> Callable[[], RankTimes]:
        """Run every action of this process's ranks. Afterwards the gradients are complete.

        Returns:
            A function that says when the actions ran; on a GPU, it waits for them, and is there only if ``record``.
        """
        device, first, training = self._transport.device, self._ranks_here[0], work.facts.training
        times: RankTimes = {rank: [] for rank in self._ranks_here}
        on_gpu = {rank: StreamTimes(self._clock) for rank in times} if record and self._clock is not None else {}
        self._guard.follow(Progress(self.steps, first, self.schedule, times[first]))
        programs = {
            rank: run_rank(
                RankStep(
                    schedule=self.schedule,
                    rank=rank,
                    stages={index: self._stages[index] for index in self.schedule.placement[rank]},
                    routes=self._routes,
                    microbatches=work.microbatches,
                    training=training,
                    seed=work.facts.seed,
                    device=device,
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
        with own_random_numbers(device) if training else nullcontext():
            self._transport.drive(programs, work.facts)
        if training:
            self._gradients.finish()
        return lambda: {rank: marks.read() for rank, marks in on_gpu.items()} or times

    @contextmanager
    def _whole_step(self) -> Iterator[None]:
        try:
            with self._guard.whole_step():
                yield
        finally:
            self._gradients.end()
            for stage in self._stages.values():
                stage.clear()

    # Optimizer steps on trial

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, on_nonfinite: OnNonfinite
    ) -> None:
        """Take an optimizer step on trial.

        A large norm is often followed by another. Then the gradients are clipped at once, over all ranks, since to run
        a step twice costs more than to wait.
        """
        self._guard.enter("optimizer_step")
        self.settle()
        clip = self._clips and max_norm is not None
        with self._guard.other_ranks():
            squares = self._transport.gather_later(to_host(self._gradients.square_norm()))
            if clip and max_norm is not None:
                self._gradients.clip(max_norm)
        self._trial = Trial(optimizer, squares, max_norm, on_nonfinite, clip, self._writes.get(optimizer))
        self._writes[optimizer] = self._trial.writes

    def settle(self) -> None:
        """If an optimizer step is on trial, agree on it now."""
        trial = self._trial
        if trial is not None:
            with self._guard.other_ranks():
                trial.wait()
            if self._verdict() == "nonfinite":
                self._reject(trial.on_nonfinite)

    def _verdict(self) -> Verdict:
        """Keep, repeat or undo the optimizer step on trial, if there is one."""
        trial, self._trial = self._trial, None
        if trial is None:
            return "kept"
        verdict = trial.settle()
        self._clips = trial.exceeded
        return verdict

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
        modules = {index: stage.module for index, stage in self._stages.items()}
        rank_of, last = self.schedule.stage_ranks(), self.schedule.num_stages - 1
        by_gradient = _nonfinite.in_gradients(modules, rank_of)
        self._gradients.drop()
        before = StateBefore(self._stages, self._last.microbatches)  # it has changed the buffers already
        with self._whole_step(), _nonfinite.looking(modules, rank_of) as found:
            self._run(self._last)
            if last in self._stages:
                found += _nonfinite.in_losses(self._stages[last].losses.values(), last, rank_of[last])
            found += by_gradient or _nonfinite.in_gradients(modules, rank_of)
        before.restore()
        everyone = [origin for row in self._transport.crew().share(found) for origin in row]
        first = _nonfinite.first(everyone)
        return str(first) if first is not None else "a sum that is not finite, of gradients that each are"
