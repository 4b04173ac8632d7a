"""What runs a pipeline's steps: begin alike on all ranks, drive the schedule, and fail in good order.

Kept apart from ``Pipeline`` is also what may follow a step: an optimizer step on trial, and the search for the module
that made gradients infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from sternway.errors import LostRankError, NonfiniteError, PipelineError, SternwayError
from sternway.pipeline import _nonfinite, _report
from sternway.pipeline._checks import check_alike, digest, signature
from sternway.pipeline._report import Position
from sternway.pipeline._run import Routes, Step, run_rank
from sternway.pipeline._stage import Microbatch, Stage
from sternway.pipeline._transport import Transport
from sternway.pipeline._trial import Policy, Trial
from sternway.schedule import Schedule

Times = dict[int, list[tuple[float, float]]]  # of each rank of this process, its actions' starts and ends


class Engine:
    """Runs the steps of the stages that are here.

    Args:
        on_weights_done: called with a stage after its last W.
        on_gradients_done: called after all actions, to add up what belongs to several ranks.
        reports: the folder for what a failed step leaves behind.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        routes: Routes,
        transport: Transport,
        ranks_here: tuple[int, ...],
        on_weights_done: Callable[[Stage], None],
        on_gradients_done: Callable[[], None],
        reports: Path,
    ) -> None:
        self._stages, self._schedule, self._routes, self._transport = stages, schedule, routes, transport
        self._ranks_here, self._reports = ranks_here, reports
        self._on_weights_done, self._on_gradients_done = on_weights_done, on_gradients_done
        self._digest = digest(schedule.to_json())
        self._last: tuple[list[Microbatch], Tensor] | None = None  # the step before: its batch and generator
        self._position: Position | None = None
        self.trial: Trial | None = None
        self.closed, self.steps, self.skipped = False, 0, 0

    def begin(self, cut: Callable[[], list[Microbatch]], training: bool) -> list[Microbatch]:
        """Agree with the other ranks on the batch to come, and on the optimizer step before it."""
        if self.closed:
            raise PipelineError("a pipeline that failed is closed", got="another step", fix="build it again")
        while True:
            batch: list[Microbatch] = []

            def prepare(batch: list[Microbatch] = batch) -> list[float]:
                batch.extend(cut())
                return [signature(batch), training, self._digest, self._share()]

            with self.alone():
                facts = self._transport.checked(prepare)
            check_alike(facts, self._schedule)
            if self._settled([row[3] for row in facts]):
                return batch

    def run(self, batch: list[Microbatch], training: bool, keep_outputs: bool) -> Times:
        """Drive every action of this process's ranks; gradients are whole afterwards."""
        generator = torch.get_rng_state()
        times: Times = {rank: [] for rank in self._ranks_here}
        if self._transport.watch is not None:
            rank = self._ranks_here[0]
            self._position = Position(self.steps, rank, self._schedule, times[rank])
            self._transport.watch.spot = self._position.spot
        works = {
            rank: run_rank(
                Step(
                    schedule=self._schedule,
                    rank=rank,
                    stages={index: self._stages[index] for index in self._schedule.placement[rank]},
                    routes=self._routes,
                    microbatches=batch,
                    training=training,
                    keep_outputs=keep_outputs,
                    on_weights_done=self._on_weights_done,
                ),
                times[rank],
            )
            for rank in self._ranks_here
        }
        self._transport.drive(works, self._schedule, self._routes, training)
        if training:
            self._on_gradients_done()
            self._last = batch, generator
        return times

    # Failure

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever fails in here fails on every rank, and closes the pipeline."""
        try:
            with self.alone():
                yield
        except LostRankError:
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for stage in self._stages.values():
                stage.clear()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Another rank's loss closes the pipeline; this rank's own mistakes need not."""
        try:
            try:
                yield
            except SternwayError:
                raise
            except RuntimeError as error:
                if self._transport.watch is None:
                    raise
                raise self._transport.explain(error) from error
        except LostRankError as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.closed = True
        self._transport.fail(error)
        self._leave_report(error)

    def _leave_report(self, error: BaseException) -> None:
        watch, rank = self._transport.watch, self._ranks_here[0]
        if watch is not None:
            path = _report.write(self._reports, rank, error, watch.loss, self._position, watch.others())
            if path is not None:
                error.add_note(f"What rank {rank} had done by then: {path}")

    # Gradients that are not finite, and steps on trial

    def settle(self) -> None:
        """If an optimizer step is on trial, agree on it now."""
        if self.trial is not None:
            with self.alone():
                rows = self._transport.gather([[self._share()]] * len(self._ranks_here))
            self._settled([row[0] for row in rows][: 1 if not self._transport.mine else None])

    def _share(self) -> float:
        return -1.0 if self.trial is None else self.trial.square

    def _settled(self, squares: list[float]) -> bool:
        """Keep or undo the step on trial; False if it was undone and looked into, which took an exchange of its own."""
        trial, self.trial = self.trial, None
        if trial is None:
            if any(square >= 0 for square in squares):
                raise PipelineError(
                    "all ranks call optimizer_step, or none", got="some of them", fix="call it on every rank"
                )
            return True
        if trial.settle(squares):
            return True
        self.reject(trial.policy)
        return False

    def finite(self, mine: bool) -> bool:
        """Whether gradients are finite on every rank."""
        rows = self._transport.gather([[float(mine)]] * len(self._ranks_here))
        return all(row[0] for row in rows)

    def reject(self, policy: Policy) -> str:
        """Drop a step's gradients and say where they came from; all ranks do so together."""
        origin = self._origin()
        for stage in self._stages.values():
            for parameter in stage.module.parameters():
                parameter.grad = None
        self.skipped += 1
        if policy == "raise":
            error = NonfiniteError(
                "gradients are finite",
                got=f"{origin}, in step {self.steps - 1}",
                fix='lower the learning rate, mend the module, or pass nonfinite="skip"',
            )
            self._leave_report(error)
            raise error
        return origin

    def _origin(self) -> str:
        """Run the last step once more and look where its numbers stop being finite."""
        assert self._last is not None
        batch, generator = self._last
        rank_of = self._schedule.stage_ranks()
        by_gradient = _nonfinite.in_gradients(self._stages, rank_of)
        kept = [(p, p.grad) for stage in self._stages.values() for p in stage.module.parameters()]
        now = torch.get_rng_state()
        for parameter, _ in kept:
            parameter.grad = None
        with self.guarded(), _nonfinite.looking(self._stages, rank_of) as found:
            self._transport.checked(lambda: [signature(batch), True, self._digest, -1.0])
            torch.set_rng_state(generator)
            self.run(batch, True, False)
            torch.set_rng_state(now)
            last = self._schedule.num_stages - 1
            if last in self._stages and (loss := _nonfinite.in_loss(self._stages[last], rank_of[last])) is not None:
                found.append(loss)
            found.extend(o for o in (by_gradient or _nonfinite.in_gradients(self._stages, rank_of),) if o is not None)
        everyone = [origin for row in self._transport.crew().share(found) for origin in row]
        first = _nonfinite.first(everyone)
        return str(first) if first is not None else "no finite sum of the gradients, though each is finite"
