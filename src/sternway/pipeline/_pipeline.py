"""Stages, a schedule and a transport make a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sternway.errors import PipelineError
from sternway.pipeline._build import from_model, from_stages
from sternway.pipeline._checks import check_alike, check_places, checked_skips, digest, signature
from sternway.pipeline._clock import offsets
from sternway.pipeline._dist import DistTransport
from sternway.pipeline._grads import DataParallel, add_ties, clip_norm, resolve_ties
from sternway.pipeline._microbatch import Chunk, ChunkSpec, cut, weights
from sternway.pipeline._result import StepResult, measured_timeline
from sternway.pipeline._run import Routes, Step, run_rank
from sternway.pipeline._stage import Loss, Microbatch, Stage
from sternway.pipeline._transport import Transport
from sternway.schedule import Schedule


class Pipeline:
    """A model trained across ranks, each holding some stages, in the order that a schedule says.

    Example, one process of several started by torchrun:
        >>> pipe = Pipeline(model, cuts="balanced", schedule="auto", num_microbatches=8,
        ...                 loss=torch.nn.functional.mse_loss, sample=batch[:4])      # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(pipe.parameters())                          # doctest: +SKIP
        >>> result = pipe.step(batch, target=target)                                  # doctest: +SKIP

    Args:
        stages: this rank's stages as ``{index: module}``, or a whole model, of which each rank keeps its part.
        schedule: a ``Schedule``, the name of one, or "auto": search for the costs of ``sample``.
        loss: ``loss(output, target)``, one number, the mean over its rows; on the last stage's rank.
        num_microbatches: into how many pieces a batch is cut; a ``Schedule`` knows.
        cuts: for a whole model, the names of the modules at which stages begin, or "balanced".
        sample: for a whole model, one microbatch to measure costs with, needed on the first rank.
        sample_target: its target, for the loss to be measured too.
        memory_limit: for "auto", how many microbatches' activations a rank may keep; twice the ranks, unless given.
        ranks: the number of ranks; the transport's, unless given.
        transport: ``DistTransport()`` over all processes, unless given.
        tied: groups of parameter names that are one parameter: gradients are summed, values kept equal.
        skips: ``{name: (from stage, to stage)}``: tensors that pass stages by; see ``WithSkips``.
        mesh: a DeviceMesh with a "dp" dimension (copies of the pipeline) and a "pp" dimension (its ranks).
        chunk: how inputs and targets are cut: ``Chunk(dim)``, ``Ready()`` or ``Whole()``.
        dynamic: stages' outputs may change shape from step to step though the batch does not.
        saved: a policy of ``sternway.saved`` for what the stages save in F, or a function that makes one for a stage's
            index; W of a split backward finds it still packed.

    Raises:
        PipelineError: on every rank, if the parts do not fit together.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module] | nn.Module,
        *,
        schedule: Schedule | str = "auto",
        loss: Loss | None = None,
        num_microbatches: int | None = None,
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
    ) -> None:
        self.chunk = chunk
        self.transport = transport or _transport_of(mesh, dynamic)
        ranks = ranks or self.transport.ranks or (schedule.ranks if isinstance(schedule, Schedule) else 0)
        if not ranks:
            raise PipelineError("a pipeline in one process is told its ranks", got="none", fix="pass ranks=")

        def build() -> list[int]:
            if isinstance(stages, Mapping):
                self._built = from_stages(stages, schedule, ranks, num_microbatches, memory_limit)
            else:
                self._built = from_model(
                    stages, cuts, schedule, ranks, num_microbatches, memory_limit, sample, loss, sample_target,
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
                loss=loss if index == last else None,
                saved=saved if saved is None or isinstance(saved, AbstractContextManager) else saved(index),
            )
            for index, module in sorted(self._built.modules.items())
        }
        self.ranks_here = self.transport.mine or tuple(range(ranks))
        self._routes = Routes(self.schedule.num_stages, checked_skips(skips or {}, self.schedule.num_stages))
        self._ties = resolve_ties(self._all_ties(tied, stages), self._named(), self.transport)
        tied_here = {id(p) for tie in self._ties for p in tie.here}
        self._late = [p for p in self.parameters() if id(p) in tied_here]
        self._copies = DataParallel(mesh.get_group("dp")) if mesh is not None else None
        self._offsets = offsets(self.transport, ranks)
        self._digest = digest(self.schedule.to_json())
        self._closed = False

    # The step

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        everywhere: dict[str, Any] | None = None,
        loss_everywhere: bool = False,
        return_outputs: bool = False,
        record: bool = True,
        **keywords: Any,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to ``.grad``, equal to the whole batch's.

        Args:
            inputs: the first stage's arguments, needed on its rank only.
            target: for the loss, needed on the last stage's rank only.
            everywhere: keyword arguments for every stage, given on every rank.
            loss_everywhere: give every rank the loss.
            return_outputs: give the last stage's rank the outputs.
            record: bring every rank's times together as ``result.timeline``.
            keywords: the first stage's keyword arguments.

        Raises:
            PipelineError: on every rank, if any rank fails; the pipeline is closed then.
        """
        return self._step(inputs, keywords, target, everywhere, True, loss_everywhere, return_outputs, record)

    def evaluate(
        self,
        *inputs: Any,
        target: Any = None,
        everywhere: dict[str, Any] | None = None,
        loss_everywhere: bool = False,
        return_outputs: bool = True,
        **keywords: Any,
    ) -> StepResult:
        """Forward alone, without gradients; the arguments are ``step``'s."""
        return self._step(inputs, keywords, target, everywhere, False, loss_everywhere, return_outputs, False)

    def _step(
        self,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        target: Any,
        everywhere: dict[str, Any] | None,
        training: bool,
        loss_everywhere: bool,
        return_outputs: bool,
        record: bool,
    ) -> StepResult:
        if self._closed:
            raise PipelineError("a pipeline that failed is closed", got="another step", fix="build it again")
        batch: list[Microbatch] = []

        def prepare() -> list[int]:
            batch.extend(self._cut(inputs, keywords, target, everywhere, training))
            return [signature(batch), int(training), self._digest]

        check_alike(self.transport.checked(prepare), self.schedule)
        times: dict[int, list[tuple[float, float]]] = {rank: [] for rank in self.ranks_here}
        works = {
            rank: run_rank(
                Step(
                    schedule=self.schedule,
                    rank=rank,
                    stages={index: self.stages[index] for index in self.schedule.placement[rank]},
                    routes=self._routes,
                    microbatches=batch,
                    training=training,
                    keep_outputs=return_outputs,
                    on_weights_done=self._weights_done,
                ),
                times[rank],
            )
            for rank in self.ranks_here
        }
        try:
            self.transport.drive(works, self.schedule, self._routes, training)
            if training:
                self._finish_gradients()
            return self._result(times, loss_everywhere, return_outputs, record and training)
        except BaseException as error:
            self._closed = True
            self.transport.fail(error)
            raise
        finally:
            for stage in self.stages.values():
                stage.clear()

    def _cut(
        self,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        target: Any,
        everywhere: dict[str, Any] | None,
        training: bool,
    ) -> list[Microbatch]:
        """The batch as microbatches, as far as this process's stages need it."""
        count, last = self.schedule.num_microbatches, self.schedule.num_stages - 1
        has_loss = last in self.stages and self.stages[last].loss_function is not None
        if training and last in self.stages and (not has_loss or target is None):
            raise PipelineError(
                "the last stage's rank trains with a loss and a target",
                got="no loss" if not has_loss else "no target",
                fix="pass loss= to Pipeline and target= to step, at least on that rank",
            )
        if 0 in self.stages and not inputs and not keywords:
            raise PipelineError("the first stage's rank is given the batch", got="no inputs", fix="pass it to step")
        arguments = cut(inputs, count, self.chunk, "the batch") if 0 in self.stages else [()] * count
        named = cut(keywords, count, self.chunk, "the batch") if 0 in self.stages else [None] * count
        targets = cut(target, count, self.chunk, "the target") if last in self.stages else [None] * count
        shared = cut(everywhere, count, self.chunk, "everywhere")
        shares = weights(targets if target is not None else arguments, self.chunk)
        return [Microbatch(*parts) for parts in zip(arguments, named, shared, targets, shares, strict=True)]

    def _weights_done(self, stage: Stage) -> None:
        if self._copies is not None:
            late = {id(p) for p in self._late}
            self._copies.start([p for p in stage.module.parameters() if id(p) not in late])

    def _finish_gradients(self) -> None:
        add_ties(self._ties, self.transport)
        if self._copies is not None:
            self._copies.start(self._late)
            self._copies.finish()

    def _result(
        self, times: dict[int, list[tuple[float, float]]], loss_everywhere: bool, return_outputs: bool, record: bool
    ) -> StepResult:
        last = self.schedule.num_stages - 1
        loss, outputs = None, None
        if last in self.stages:
            stage = self.stages[last]
            if stage.losses:
                loss = torch.stack([stage.losses[i] for i in sorted(stage.losses)]).sum()
            if return_outputs:
                outputs = [stage.outputs[i] for i in sorted(stage.outputs)]
        if loss_everywhere:
            known = 0.0 if loss is None else float(loss)
            rows = self.transport.gather([[known]])
            loss = torch.tensor(rows[self.schedule.rank_of(last) if len(rows) > 1 else 0][0])
        timeline = self._timeline(times) if record else None
        return StepResult(loss, outputs, timeline)

    def _timeline(self, times: dict[int, list[tuple[float, float]]]) -> Any:
        width = max(len(steps) for steps in self.schedule.actions)
        rows = [
            [number for pair in times[rank] for number in pair] + [0.0] * (2 * (width - len(times[rank])))
            for rank in self.ranks_here
        ]
        everyone = []
        for rank, row in enumerate(self.transport.gather(rows)):
            used = len(self.schedule.actions[rank])
            shift = self._offsets[rank]
            everyone.append([(row[2 * i] - shift, row[2 * i + 1] - shift) for i in range(used)])
        return measured_timeline(self.schedule, everyone, self.costs.memory_after_I)

    # The parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, under their names in the whole model where that was given."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for name, parameter in stage.module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their norm together is at most ``max_norm``; the norm before."""

        def add(square: Tensor) -> None:
            if self.transport.mine:
                self.transport.add([square], range(self.schedule.ranks))

        return clip_norm(list(self.parameters()), self._ties, max_norm, add)

    def state_dict(self) -> dict[str, Tensor]:
        """This process's parameters and buffers by name."""
        return {name: value for stage in self.stages.values() for name, value in stage.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this process's parameters and buffers from ``state``, which may be the whole model's."""
        for stage in self.stages.values():
            own = stage.module.state_dict()
            missing = sorted(own.keys() - state.keys())
            if missing:
                raise PipelineError(
                    "a state has every parameter of this rank", got=f"none for {missing[0]}", fix="save it again"
                )
            stage.module.load_state_dict({name: state[name] for name in own})

    def train(self, mode: bool = True) -> Pipeline:
        """Put this process's modules into training mode, as ``nn.Module.train``."""
        for stage in self.stages.values():
            stage.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put this process's modules into evaluation mode, as ``nn.Module.eval``."""
        return self.train(False)

    def close(self) -> None:
        """Give back the process groups. The pipeline is of no use afterwards."""
        if not self._closed:
            self._closed = True
            self.transport.close()

    def _named(self) -> dict[int, dict[str, nn.Parameter]]:
        return {
            rank: {
                name: parameter
                for index in self.schedule.placement[rank]
                for name, parameter in self.stages[index].module.named_parameters()
            }
            for rank in self.ranks_here
        }

    def _all_ties(self, tied: Sequence[Sequence[str]], model: Any) -> list[Sequence[str]]:
        """The ties asked for, and those that a whole model has in itself."""
        groups: dict[int, list[str]] = {}
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters(remove_duplicate=False):
                groups.setdefault(id(parameter), []).append(name)
        return [*tied, *(names for names in groups.values() if len(names) > 1)]


def _transport_of(mesh: Any, dynamic: bool) -> Transport:
    if mesh is None:
        return DistTransport(dynamic=dynamic)
    names = tuple(mesh.mesh_dim_names or ())
    if "pp" not in names or "dp" not in names:
        raise PipelineError('a mesh has the dimensions "dp" and "pp"', got=str(names), fix="name them so")
    device = "cuda" if mesh.device_type == "cuda" else "cpu"
    return DistTransport(dist.get_process_group_ranks(mesh.get_group("pp")), device, dynamic=dynamic)
