"""``Pipeline``: what a user holds. It builds the parts, and passes each call on to the one that does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sternway._torch import require
from sternway._torch.dtensors import local_part
from sternway.errors import PipelineError
from sternway.pipeline.build._agree import describe
from sternway.pipeline.build._assemble import PipelineArguments, Saved, assemble
from sternway.pipeline.build._shard_stage import ShardFn
from sternway.pipeline.build._sharding import whole_state
from sternway.pipeline.build._weights import Weights
from sternway.pipeline.checkpoint._checkpoint import Checkpoints, SaveRequest, with_prefixes
from sternway.pipeline.checkpoint._saving import Resumed, Saving
from sternway.pipeline.faults._nonfinite import OnNonfinite, check_nonfinite
from sternway.pipeline.pretrained._generate import generate
from sternway.pipeline.pretrained._save import save_model
from sternway.pipeline.step._batch import Batch
from sternway.pipeline.step._evaluation import in_eval_mode
from sternway.pipeline.step._grads import check_norm
from sternway.pipeline.step._microbatch import Chunk, ChunkSpec
from sternway.pipeline.step._result import StepResult
from sternway.pipeline.step._runner import StepOptions
from sternway.pipeline.step._scaler import GradScaler
from sternway.pipeline.step._stage import LossFn
from sternway.pipeline.step._tuner import TriedPlan
from sternway.pipeline.transport._shards import sharded_like
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule


class Pipeline:
    """A model that is trained across ranks. Each rank holds some stages, and a schedule gives the order of work.

    Example, one process of several started by torchrun:
        >>> pipe = Pipeline(model, cuts="balanced", schedule="auto", n_microbatches=8,
        ...                 loss_fn=torch.nn.functional.mse_loss, sample=batch[:4])      # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(pipe.parameters())                          # doctest: +SKIP
        >>> result = pipe.step(batch, target=target)                                  # doctest: +SKIP

    Args:
        stages: this rank's stages as ``{index: module}``, or a whole model, of which each rank keeps its part; what
            other ranks keep is moved to the meta device. See ``docs/models.md``.
        schedule: a ``Schedule``, the name of one, or "auto": search for the best one, given the costs of ``sample``,
            or without one those of the first steps; try the best ones in the next steps, keep the fastest, and search
            again when costs change.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the rows, or a sum and the count to divide it by;
            used on the rank of the last stage. For a whole model by default its own loss, ``output.loss``.
        n_microbatches: into how many microbatches a batch is cut; a ``Schedule`` knows its own number.
        cuts: for a whole model, the names of the modules at which stages begin, or "balanced".
        sample: for a whole model, one microbatch, to find what crosses the cuts and to measure costs; a tensor, a tuple
            of arguments, or a dict of keyword arguments. Needed on the first rank only.
        sample_target: its target, to measure the loss, too.
        memory_limit: how many microbatches' activations a rank may keep, as F leaves them; for "auto", twice the ranks
            by default, of what I leaves if that is more.
        memory: what each rank has: bytes, or text such as "20GB". What a plan holds is counted as by ``fit``, AdamW's
            state included, and what ``shard`` shards as shards over "dp_shard". "auto" takes the fastest plan within
            it, and recomputes some blocks of some stages, or offloads some microbatches, if it must; so does a named
            schedule. If none fits, that is an error. Needs ``sample``.
        ranks: the number of ranks; the transport's by default.
        transport: ``DistTransport()`` over all processes by default.
        tied: groups of names of parameters that are one parameter: gradients are summed, values kept equal.
        skips: ``{name: (from stage, to stage)}`` for tensors that go to a stage after the next; see ``WithSkips``.
        mesh: a DeviceMesh with a dimension of the pipeline's ranks, and others; see ``docs/sharded.md``.
        pp_dim: the name of that dimension.
        data_dims: the names of the dimensions along which processes get different rows; "dp", "dp_replicate" and
            "dp_shard" by default. Gradients are averaged over them.
        cp_dim: the name of the dimension along which processes get different slices of the same sequences; "cp" by
            default, if the mesh has it. Losses and gradients are those of the whole sequences.
        shard: for a whole model, a function that is called with each stage and calls ``fully_shard`` on it, or on
            modules of it. Stages that are passed one by one may be sharded already.
        gathered: how many sharded stages a rank keeps gathered at once; all its stages by default, each gathered once
            in a step. "auto" keeps fewer by default, if ``memory`` makes that faster.
        chunk: how inputs and targets are cut: ``Chunk(dim)``, ``Presplit()`` or ``Replicate()``.
        dynamic: the shapes of stages' outputs may change from step to step even if those of the batch do not.
        saved: a policy of ``sternway.saved`` for what the stages save in F, or a function from a stage's index to one.
        offload_to: a folder on a disk for what is offloaded, by a schedule with OFFLOAD or to stay within ``memory``;
            the host's memory by default, which a GPU has beside its own.
        offload_rate: how many bytes can be moved there or back in a second, to choose a plan within ``memory``;
            measured when the pipeline is built, unless given.
        scaler: scales the loss, for gradients in float16.
        reduce_dtype: sum the gradients of tied parameters and of copies in this dtype; in their own by default.
        heartbeat_timeout: a rank that gives no sign of life for so many seconds is lost; 0 to watch for none.
        reports: the folder for reports about failed steps; see ``docs/survive.md``.
        weights: for a whole model with its parameters on the meta device: a function that returns tensors by name. It
            is called once, with the names that this process's stages have. No process has the whole model in memory.
        device: where to put these; the CPU by default.
        cuda_graphs: run the stages as CUDA graphs, so that a GPU does not wait for Python; see ``docs/captured.md``. A
            stage that cannot be captured runs as it is, with a warning that says why.
        tune: whether "auto" may change its schedule between steps. The order of sums, and so the last bits of
            gradients, change with it. Copies of a pipeline (``mesh``) change it together.

    Attributes:
        profile: what was measured of ``sample``, one entry for each stage; None if nothing was.
        stages: this process's, by index.
        transport: carries the messages.

    Raises:
        PipelineError: on every rank, if the arguments do not fit together.
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
        memory: int | str | None = None,
        ranks: int | None = None,
        transport: Transport | None = None,
        tied: Sequence[Sequence[str]] = (),
        skips: Mapping[str, tuple[int, int]] | None = None,
        mesh: Any = None,
        pp_dim: str = "pp",
        data_dims: Sequence[str] | None = None,
        cp_dim: str | None = None,
        shard: ShardFn | None = None,
        gathered: int | None = None,
        chunk: ChunkSpec = Chunk(0),  # noqa: B008 - frozen, so safely shared
        dynamic: bool = False,
        saved: Saved | None = None,
        offload_to: str | Path | None = None,
        offload_rate: int | str | None = None,
        scaler: GradScaler | None = None,
        reduce_dtype: torch.dtype | None = None,
        heartbeat_timeout: float = 30,
        reports: str | Path | None = None,
        weights: Weights | None = None,
        device: torch.device | str | None = None,
        tune: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        require("pipeline")
        given = PipelineArguments(
            stages=stages, schedule=schedule, loss_fn=loss_fn, n_microbatches=n_microbatches, cuts=cuts, sample=sample,
            sample_target=sample_target, memory_limit=memory_limit, memory=memory, ranks=ranks, transport=transport,
            tied=tied, skips=skips, mesh=mesh, pp_dim=pp_dim, data_dims=data_dims, cp_dim=cp_dim, shard=shard,
            gathered=gathered, chunk=chunk, dynamic=dynamic, saved=saved, offload_to=offload_to,
            offload_rate=offload_rate, scaler=scaler, reduce_dtype=reduce_dtype, heartbeat_timeout=heartbeat_timeout,
            reports=reports, weights=weights, device=device, tune=tune, cuda_graphs=cuda_graphs,
        )  # fmt: skip
        parts = assemble(given)
        self.transport, self.stages, self.profile = parts.transport, parts.stages, parts.plan.profile
        self._plan, self._ties, self._gradients = parts.plan, parts.ties, parts.gradients
        self._guard, self._runner, self._tuner, self._scaler = parts.guard, parts.runner, parts.tuner, scaler
        self._everyone = None if parts.mesh is None else parts.mesh.everyone
        self._is_first_copy = parts.mesh is None or parts.mesh.is_first
        self._model = stages if isinstance(stages, nn.Module) else None
        modules = {index: stage.module for index, stage in self.stages.items()}
        self._named = with_prefixes(modules, self._model is not None, self.transport.crew())
        self._source: Path | None = None  # the checkpoint that from_pretrained read
        self._saves: Checkpoints | None = None

    # The plan

    @property
    def schedule(self) -> Schedule:
        """The schedule of all ranks, for the next step: "auto" may change it between steps."""
        return self._runner.schedule if self._tuner is None else self._tuner.schedule

    @property
    def costs(self) -> Costs:
        """What the schedule was planned for: what "auto" measured last, if it has."""
        return self._plan.costs if self._tuner is None else self._tuner.costs

    @property
    def plans(self) -> tuple[TriedPlan, ...]:
        """The schedules that "auto" has tried in steps so far, with planned and measured times."""
        return () if self._tuner is None else tuple(self._tuner.plans)

    def stop_tuning(self) -> None:
        """Let "auto" keep the best plan so far. Call it on every rank, after the same step."""
        if self._tuner is not None:
            self._tuner.stop()

    # The step

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_everywhere: bool = False,
        return_outputs: bool = False,
        record: bool = True,
        nonfinite: OnNonfinite | None = None,
        **keywords: Any,
    ) -> StepResult:
        """Run the forward and backward of one batch. Gradients are added to ``.grad``, as for the whole batch at once.

        Args:
            inputs: the arguments of the first stage; needed on its rank only.
            target: the target of the loss; needed on the rank of the last stage only.
            stage_kwargs: keyword arguments for every stage; needed on every rank.
            loss_everywhere: return the loss on every rank.
            return_outputs: return the outputs, on the rank of the last stage.
            record: note what every rank runs and when, for ``result.timeline``.
            nonfinite: what to do if the gradients of any rank are not finite: "raise" on all ranks, or "skip", which
                sets all gradients to None, so that the optimizer does nothing. All ranks wait for each other to find
                out; ``optimizer_step`` does not.
            keywords: keyword arguments of the first stage, such as ``input_ids=…, labels=…``.

        Raises:
            PipelineError: on every rank, if the step fails on any. The pipeline is closed then.
            LostRankError: on every other rank, if one dies, is stopped or fails. The pipeline is closed then.
            NonfiniteError: on every rank, with ``nonfinite="raise"``. The pipeline can still be used.
        """
        check_nonfinite(nonfinite, optional=True)
        options = StepOptions(True, loss_everywhere, return_outputs, record, nonfinite)
        return self._runner.step(Batch(inputs, keywords, target, stage_kwargs), options)

    def evaluate(
        self,
        *inputs: Any,
        target: Any = None,
        stage_kwargs: dict[str, Any] | None = None,
        loss_everywhere: bool = True,
        return_outputs: bool = True,
        join: bool = True,
        **keywords: Any,
    ) -> StepResult:
        """Run the forward alone, without gradients and in eval mode. Afterwards all modules are in their modes again.

        Args:
            inputs: those of ``step``, as are the arguments that are not described here.
            target: of the loss; without one (and without labels, for a model's own loss) the loss is None.
            stage_kwargs: keyword arguments for every stage.
            loss_everywhere: return the loss on every rank; else only on that of the last stage.
            return_outputs: return the outputs, on the rank of the last stage.
            join: join the outputs of the microbatches along the dimension that the batch was cut along. If False, or
                if the batch is not cut by ``Chunk``, they are a list. A value that has no rows becomes a list, too,
                unless it is the same in all.
            keywords: keyword arguments of the first stage.
        """
        options = StepOptions(False, loss_everywhere, return_outputs, join=join)
        with in_eval_mode(self.stages):
            return self._runner.step(Batch(inputs, keywords, target, stage_kwargs), options)

    # The optimizer

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None, nonfinite: OnNonfinite = "raise"
    ) -> None:
        """Take an optimizer step without waiting for the other ranks, and set the gradients to None.

        Whether the gradients of all ranks were finite, and their norm at most ``max_norm``, is looked at when the next
        step is done (or ``settle`` is called). If not, the step is undone exactly, and then repeated with clipped
        gradients, skipped, or raised, and the next step is run again. Until then, copies of the parameters and of the
        optimizer's state are kept.

        Args:
            optimizer: made from ``pipe.parameters()``; with ``max_norm``, from all that get gradients.
            max_norm: clip the gradients of all ranks to this norm, as ``clip_grad_norm_`` does.
            nonfinite: "raise" a ``NonfiniteError`` on all ranks, or "skip" the step; ``pipe.skipped`` counts these.
        """
        check_nonfinite(nonfinite, optional=False)
        if max_norm is not None:
            check_norm(max_norm)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PipelineError(
                "optimizer must be a torch.optim.Optimizer", got=type(optimizer).__name__, fix="pass one"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            rule, fix = "an optimizer cannot run steps of a pipeline by itself, as a closure would", "pass another one"
            raise PipelineError(rule, got=type(optimizer).__name__, fix=fix)
        if self._scaler is not None:
            self._scaler.check_unscaled(optimizer)
        if max_norm is not None:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for name, parameter in self.named_parameters():
                if parameter.grad is not None and id(parameter) not in own:
                    raise PipelineError(
                        "with max_norm, an optimizer must have all parameters with gradients: all are clipped",
                        got=f"one without {name}",
                        fix="call pipe.clip_grad_norm_, and then step and zero_grad of each optimizer",
                    )
        self._runner.optimizer_step(optimizer, max_norm, nonfinite)

    def settle(self) -> None:
        """Agree on the last ``optimizer_step`` now, on every rank. Call it before you look at parameters."""
        self._runner.settle()

    @property
    def skipped(self) -> int:
        """How many steps were dropped because gradients were not finite."""
        return self._runner.skipped

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before."""
        check_norm(max_norm)
        self._guard.enter("clip_grad_norm_")
        with self._guard.other_ranks():
            return self._gradients.clip(max_norm)

    # Parameters and buffers of this process

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, each once, by their names in the whole model.

        If stages were passed that have names in common, theirs begin with the stage's index, as in an
        ``nn.Sequential`` of the stages.
        """
        seen: set[int] = set()
        for prefix, module in self._named:
            for name, parameter in module.named_parameters(prefix.removesuffix(".")):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """This process's parameters and buffers, by the names of ``named_parameters``.

        What is sharded is a DTensor. So a pipeline is a ``Stateful`` of torch.distributed.checkpoint: all processes
        call ``dcp.save({"model": pipe})``, and the checkpoint has the whole model.
        """
        return {prefix + name: value for prefix, part in self._named for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this process's parameters and buffers from ``state``, which may be that of the whole model."""
        PipelineError.unless(isinstance(state, Mapping), "state must be a dict of tensors by name", state, "pass one")
        for prefix, module in self._named:
            own = module.state_dict()
            missing = sorted(prefix + name for name in own if prefix + name not in state)
            if missing:
                rule, fix = "state must have every parameter of this rank", "pass the state of the same model"
                raise PipelineError(rule, got=f"none for {missing[0]}", fix=fix)
            try:
                module.load_state_dict({name: sharded_like(state[prefix + name], each) for name, each in own.items()})
            except (RuntimeError, TypeError, AttributeError) as error:
                got, fix = f"{type(error).__name__}: {error}", "pass the state of the same model"
                raise PipelineError("state must fit the model", got=got, fix=fix) from None

    def train(self, mode: bool = True) -> Self:
        """Set this process's modules to training mode, as ``nn.Module.train``."""
        for stage in self.stages.values():
            stage.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set this process's modules to evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

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
        """Write a checkpoint of everything that training needs to continue. Call it on every rank.

        A checkpoint is complete or not there: a run that dies while writing leaves the one before. Tensors are saved
        under their names in the whole model by torch.distributed.checkpoint, so they can be loaded with any number of
        ranks and any schedule, and by other programs.

        Args:
            directory: the folder for checkpoints; each is a folder ``step-…`` in it.
            optimizer: saved, too, by parameter name.
            step: how many steps are done.
            scheduler: a learning rate scheduler, or anything else with ``state_dict`` and ``load_state_dict``.
            data: the position in the data: numbers, text, tensors and containers of them.
            keep: how many checkpoints to keep; all by default.
            wait: return when it is written. If False, training waits only for a copy to the CPU, which a thread writes;
                the next ``save``, ``resume`` or ``close`` waits for the thread, and raises what went wrong.

        Raises:
            CheckpointError: on every rank, if one could not write its part.
        """
        self._guard.enter("save")
        self._runner.settle()
        with self._guard.other_ranks():
            request = SaveRequest(directory, optimizer, step, scheduler, data, keep, self._runner.steps)
            return self._checkpoints().save(request, wait)

    def resume(
        self,
        directory: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: Any = None,
        step: int | None = None,
    ) -> Resumed | None:
        """Load the newest intact checkpoint, on every rank; None if there is no checkpoint.

        One that is damaged is skipped with a ``CheckpointWarning``. The random number generators are restored, too.

        Args:
            directory: what was passed to ``save``.
            optimizer: loaded, if given.
            scheduler: loaded, if given.
            step: load the checkpoint of this step and no other.

        Raises:
            CheckpointError: on every rank, if there are checkpoints but none is intact, or they do not fit the model.
        """
        self._guard.enter("resume")
        self._runner.settle()
        with self._guard.other_ranks():
            found = self._checkpoints().resume(directory, optimizer, scheduler, step)
        if found is not None:
            passes = self._checkpoints().passes
            self._runner.continue_from(found.step if passes is None else passes)
        return found

    def save_pretrained(self, path: str | Path) -> None:
        """Write a checkpoint that ``from_pretrained`` of transformers loads. Call it on every rank.

        Each process writes its own tensors; the configuration, and the tokenizer's files if ``from_pretrained`` of
        Sternway made the pipeline, go along. Of a model of PEFT, only the adapters are written.

        Args:
            path: the folder; what it has of an earlier save is replaced.

        Raises:
            PipelineError: on every rank, if the model is not one of transformers or PEFT, or one cannot write.
        """
        self._guard.enter("save_pretrained")
        self._runner.settle()
        with self._guard.other_ranks():
            crew = self.transport.crew() if self._everyone is None else self.transport.crew_apart(self._everyone)
            state = whole_state(self.state_dict())  # on every process, which all have a shard
            save_model(path, crew, self._model, state if self._is_first_copy else {}, self._source)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``model.generate`` of transformers, in one process. Over several processes it is refused."""
        self._runner.settle()
        return generate(self._model, self.transport.ranks if self.transport.mine else 1, args, kwargs)

    def _checkpoints(self) -> Checkpoints:
        if self._saves is None:
            self.transport.crew().share(None)  # a new group waits for all ranks, and nothing would wake it
            ties = {name: tie.names for tie in self._ties for name in tie.names}
            crew = self.transport.crew_apart(self._everyone)
            self._saves = Checkpoints(crew, self._named, ties, self.schedule.name)
        return self._saves

    def close(self) -> None:
        """Finish what is in progress, and destroy the process groups. The pipeline cannot be used afterwards."""
        self.stop_tuning()
        try:
            if not self._guard.closed:
                self._runner.settle()
                if self._saves is not None:
                    with self._guard.other_ranks():
                        self._saves.finish()
                self._guard.close()
        finally:
            for stage in self.stages.values():
                stage.close()

    def __repr__(self) -> str:
        now = replace(self._plan, schedule=self.schedule, costs=self.costs)
        return describe(now, self.transport, sum(local_part(p).nbytes for p in self.parameters()))
