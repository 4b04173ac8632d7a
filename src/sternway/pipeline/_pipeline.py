"""Stages, a schedule and a transport make a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline import _report
from sternway.pipeline._batch import cut_batch
from sternway.pipeline._build import from_model, from_stages
from sternway.pipeline._checkpoint import Checkpoints
from sternway.pipeline._checks import check_alike, check_arguments, check_places, check_policy, checked_skips, digest
from sternway.pipeline._clock import offsets
from sternway.pipeline._dist import transport_of
from sternway.pipeline._engine import Engine
from sternway.pipeline._grads import DataParallel, add_ties, all_ties, check_norm, clip_norm, resolve_ties, square_norm
from sternway.pipeline._held import Held
from sternway.pipeline._microbatch import Chunk, ChunkSpec
from sternway.pipeline._result import StepResult, collect, gather_timeline
from sternway.pipeline._run import Routes
from sternway.pipeline._saving import Resumed, Saving
from sternway.pipeline._stage import LossFn, Stage
from sternway.pipeline._transport import Transport
from sternway.pipeline._trial import Policy, Trial
from sternway.schedule import Schedule


class Pipeline(Held):
    """A model trained across ranks, each holding some stages, in the order that a schedule says.

    Example, one process of several started by torchrun:
        >>> pipe = Pipeline(model, cuts="balanced", schedule="auto", n_microbatches=8,
        ...                 loss_fn=torch.nn.functional.mse_loss, sample=batch[:4])      # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(pipe.parameters())                          # doctest: +SKIP
        >>> result = pipe.step(batch, target=target)                                  # doctest: +SKIP

    Args:
        stages: this rank's stages as ``{index: module}``, or a whole model, of which each rank keeps its part.
        schedule: a ``Schedule``, the name of one, or "auto": search for the costs of ``sample``.
        loss_fn: ``loss_fn(output, target)``, one number, the mean over its rows; on the last stage's rank.
        n_microbatches: into how many pieces a batch is cut; a ``Schedule`` knows.
        cuts: for a whole model, the names of the modules at which stages begin, or "balanced".
        sample: for a whole model, one microbatch to measure costs with, needed on the first rank.
        sample_target: its target, for the loss to be measured too.
        memory_limit: for "auto", how many microbatches' activations a rank may keep; twice the ranks, unless given.
        ranks: the number of ranks; the transport's, unless given.
        transport: ``DistTransport()`` over all processes, unless given.
        tied: groups of parameter names that are one parameter: gradients are summed, values kept equal.
        skips: ``{name: (from stage, to stage)}``: tensors that pass stages by; see ``WithSkips``.
        mesh: a DeviceMesh with a "dp" dimension (copies of the pipeline) and a "pp" dimension (its ranks).
        chunk: how inputs and targets are cut: ``Chunk(dim)``, ``Presplit()`` or ``Replicate()``.
        dynamic: stages' outputs may change shape from step to step though the batch does not.
        saved: a policy of ``sternway.saved`` for what the stages save in F, or a function that makes one for a stage's
            index; W of a split backward finds it still packed.
        heartbeat_timeout: seconds without a sign of life after which a rank counts as lost on all others; 0: never.
        reports: the folder for what a failed step leaves behind; see ``docs/survive.md``.

    Raises:
        PipelineError: on every rank, if the parts do not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module] | nn.Module,
        *,
        schedule: Schedule | str = "auto",
        loss_fn: LossFn | None = None,
        n_microbatches: int | None = None,
        cuts: Sequence[str] | str = "balanced",
        sample: Any = None,
        sample_target: Any = None,
        memory_limit: float | None = None,
        ranks: int | None = None,
        transport: Transport | None = None,
        tied: Sequence[Sequence[str]] = (),
        skips: Mapping[str, tuple[int, int]] | None = None,
        mesh: Any = None,
        chunk: ChunkSpec = Chunk(0),  # noqa: B008 - frozen, so safely shared
        dynamic: bool = False,
        saved: AbstractContextManager[Any] | Callable[[int], AbstractContextManager[Any]] | None = None,
        heartbeat_timeout: float = 30,
        reports: str | Path | None = None,
    ) -> None:
        check_arguments(stages, schedule, n_microbatches, ranks, transport, chunk, loss_fn, reports, mesh)
        self.chunk = chunk
        self.transport = transport or transport_of(mesh, dynamic, heartbeat_timeout)
        ranks = ranks or self.transport.ranks or (schedule.ranks if isinstance(schedule, Schedule) else 0)
        if not ranks:
            raise PipelineError("a pipeline in one process is told its ranks", got="none", fix="pass ranks=")

        def build() -> list[float]:
            if isinstance(stages, Mapping):
                self._built = from_stages(stages, schedule, ranks, n_microbatches, memory_limit)
            else:
                self._built = from_model(
                    stages, cuts, schedule, ranks, n_microbatches, memory_limit, sample, loss_fn, sample_target,
                    self.transport,
                )  # fmt: skip
            check_places(self._built, ranks, self.transport)
            return [0, 0, digest(self._built.schedule.to_json())]

        facts = self.transport.checked(build)
        self.schedule, self.costs = self._built.schedule, self._built.costs
        check_alike(facts, self.schedule)
        last = self.schedule.num_stages - 1
        self.stages = {
            index: Stage(
                index,
                module,
                is_last=index == last,
                loss_fn=loss_fn if index == last else None,
                saved=saved if saved is None or isinstance(saved, AbstractContextManager) else saved(index),
            )
            for index, module in sorted(self._built.modules.items())
        }
        self.ranks_here = self.transport.mine or tuple(range(ranks))
        routes = Routes(
            self.schedule.num_stages, checked_skips({} if skips is None else skips, self.schedule.num_stages)
        )
        self._ties = resolve_ties(all_ties(tied, stages), self._named(), self.transport)
        tied_here = {id(p) for tie in self._ties for p in tie.here}
        self._late = [p for p in self.parameters() if id(p) in tied_here]
        self._copies = DataParallel(self.transport.group_like(mesh.get_group("dp"))) if mesh is not None else None
        self._offsets = offsets(self.transport, ranks)
        self._whole_names = isinstance(stages, nn.Module)
        self._everyone = None if mesh is None else mesh.mesh.flatten().tolist()
        self._saves: Checkpoints | None = None
        self._engine = Engine(
            self.stages, self.schedule, routes, self.transport, self.ranks_here,
            self._weights_done, self._finish_gradients, Path(reports or _report.default_folder()),
        )  # fmt: skip

    # The step

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_everywhere: bool = False,
        return_outputs: bool = False,
        record: bool = True,
        nonfinite: Policy | None = None,
        **keywords: Any,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to ``.grad``, equal to the whole batch's.

        Args:
            inputs: the first stage's arguments, needed on its rank only.
            target: for the loss, needed on the last stage's rank only.
            stage_kwargs: keyword arguments for every stage, given on every rank.
            loss_everywhere: give every rank the loss.
            return_outputs: give the last stage's rank the outputs.
            record: bring every rank's times together as ``result.timeline``.
            nonfinite: where any rank's gradients are not finite, "raise" on all, or "skip": take all gradients away, so
                that the optimizer does nothing. All ranks wait for that; ``optimizer_step`` does it without.
            keywords: the first stage's keyword arguments.

        Raises:
            PipelineError: on every rank, if any rank fails; the pipeline is closed then.
            LostRankError: on every other rank, if one dies, is stopped or fails.
            NonfiniteError: on every rank, if that was asked for; the pipeline goes on.
        """
        check_policy(nonfinite)
        engine = self._engine
        batch = engine.begin(
            lambda: cut_batch(self.stages, self.schedule, self.chunk, inputs, keywords, target, stage_kwargs, True),
            True,
        )
        with engine.guarded():
            times = engine.run(batch, True, return_outputs)
            loss, outputs = collect(self.stages, self.schedule, self.transport, loss_everywhere, return_outputs)
            timeline = None
            if record:
                memory = self.costs.memory_after_I
                timeline = gather_timeline(self.schedule, self.transport, times, self._offsets, memory)
            fit = nonfinite is None or engine.finite(
                bool(torch.isfinite(square_norm([*self.parameters()], self._ties)))
            )
        engine.steps += 1
        origin = None if fit or nonfinite is None else engine.reject(nonfinite)
        return StepResult(loss, outputs, timeline, origin)

    def evaluate(
        self,
        *inputs: Any,
        target: Any = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_everywhere: bool = False,
        return_outputs: bool = True,
        **keywords: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the arguments are ``step``'s."""
        batch = self._engine.begin(
            lambda: cut_batch(self.stages, self.schedule, self.chunk, inputs, keywords, target, stage_kwargs, False),
            False,
        )
        with self._engine.guarded():
            self._engine.run(batch, False, return_outputs)
            loss, outputs = collect(self.stages, self.schedule, self.transport, loss_everywhere, return_outputs)
        return StepResult(loss, outputs, None)

    def _weights_done(self, stage: Stage) -> None:
        if self._copies is not None:
            late = {id(p) for p in self._late}
            self._copies.start([p for p in stage.module.parameters() if id(p) not in late])

    def _finish_gradients(self) -> None:
        add_ties(self._ties, self.transport)
        if self._copies is not None:
            self._copies.start(self._late)
            self._copies.finish()

    # The optimizer

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, nonfinite: Policy = "raise"
    ) -> None:
        """Take an optimizer step at once, without waiting for the other ranks; gradients are taken away.

        Whether all ranks' gradients were finite, and their norm at most ``max_norm``, turns out when the next step
        begins (or ``settle`` is called): what was wrong is then undone, to the bit, and taken again with smaller
        gradients, or skipped, or raised. Costs a copy of parameters and optimizer state until then.

        Args:
            optimizer: made from ``pipe.parameters()``.
            max_norm: the norm of all ranks' gradients that is not to be exceeded, as by ``clip_grad_norm_``.
            nonfinite: "raise" a ``NonfiniteError`` on all ranks, or "skip" the step; ``pipe.skipped`` counts.
        """
        check_policy(nonfinite, optional=False)
        if max_norm is not None:
            check_norm(max_norm)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PipelineError("an optimizer takes the step", got=type(optimizer).__name__, fix="pass an optimizer")
        self._engine.settle()
        square = square_norm(list(self.parameters()), self._ties)
        self._engine.trial = Trial(optimizer, square, max_norm, nonfinite)

    def settle(self) -> None:
        """Agree on the last ``optimizer_step`` now, on every rank: before parameters are looked at, say."""
        self._engine.settle()

    @property
    def skipped(self) -> int:
        """How many steps were dropped because gradients were not finite."""
        return self._engine.skipped

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their norm together is at most ``max_norm``; the norm before."""

        def add(square: Tensor) -> None:
            if self.transport.mine:
                self.transport.add([square], range(self.schedule.ranks))

        return clip_norm(list(self.parameters()), self._ties, max_norm, add)

    # Checkpoints

    def save(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        step: int = 0,
        *,
        scheduler: Any = None,
        data: Any = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Saving:
        """Write a checkpoint of everything that training goes on from; called on every rank.

        It is whole or not there: a run that dies while writing leaves the one before. Tensors are kept under the whole
        model's names by torch.distributed.checkpoint: other numbers of ranks, schedules and programs can read them.

        Args:
            directory: where checkpoints are, one folder ``step-…`` for each.
            optimizer: saved too, by parameter name.
            step: how many steps are done.
            scheduler: a learning rate scheduler, or anything else with ``state_dict`` and ``load_state_dict``.
            data: the position in the data: numbers, text, tensors and containers of them.
            keep: how many checkpoints to keep; all, unless given.
            wait: until it is written. If not, training waits for a copy to the CPU only, and a thread writes that;
                the next ``save``, ``resume`` or ``close`` waits for it, and raises what went wrong.

        Raises:
            CheckpointError: on every rank, if one could not write its part.
        """
        self._engine.settle()
        with self._engine.alone():
            return self._checkpoints().save(directory, optimizer, step, scheduler, data, keep, wait)

    def resume(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        step: int | None = None,
    ) -> Resumed | None:
        """Go on from the newest whole checkpoint, on every rank; None if there is none at all.

        One that is damaged is passed over with a ``CheckpointWarning``. Random numbers go on, too.

        Args:
            directory: what ``save`` was given.
            optimizer: filled if given.
            scheduler: filled if given.
            step: the checkpoint of this step and no other.

        Raises:
            CheckpointError: on every rank, if there are checkpoints but none is whole, or the model does not fit.
        """
        self._engine.settle()
        with self._engine.alone():
            found = self._checkpoints().resume(directory, optimizer, scheduler, step)
        if found is not None:
            self._engine.steps = found.step
        return found

    def _checkpoints(self) -> Checkpoints:
        if self._engine.closed:
            raise PipelineError("a pipeline that failed is closed", got="a checkpoint", fix="build it again")
        if self._saves is None:
            ties = {name: tie.names for tie in self._ties for name in tie.names}
            modules = {index: stage.module for index, stage in self.stages.items()}
            crew = self.transport.crew_apart(self._everyone)
            self._saves = Checkpoints(crew, modules, self._whole_names, ties, self.schedule.name)
        return self._saves

    def close(self) -> None:
        """Finish what is under way and give back the process groups. The pipeline is of no use afterwards."""
        if not self._engine.closed:
            self._engine.settle()
            if self._saves is not None:
                with self._engine.alone():
                    self._saves.finish()
            self._engine.closed = True
            self.transport.close()
