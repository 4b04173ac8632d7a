"""From the arguments of ``Pipeline`` to its parts, one after the other, on all ranks together.

ground     the device, the mesh, the transport: where the pipeline runs
plan       the cuts, the schedule, what fits; all ranks agree on it
stages     this process's, sharded and able to move microbatches; the schedule with their upkeep
gradients  what concerns several processes: ties, copies, shards
runner     runs steps by the schedule, which a tuner may change
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sternway._bytes import parse_bytes
from sternway.errors import PipelineError
from sternway.pipeline.build._agree import agreed_plan, make_stages, make_tuner
from sternway.pipeline.build._checks import (
    check_arguments,
    check_cuda_graphs,
    check_plain,
    check_recompute,
    check_weights,
    checked_skips,
    is_sharded,
)
from sternway.pipeline.build._offload import check_offload, given_rate, make_policies, moves
from sternway.pipeline.build._plan import BuildPlan
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.build._same_weights import check_same_weights
from sternway.pipeline.build._shard_stage import ShardFn
from sternway.pipeline.build._sharding import counted_shards, shard_link, shard_stages, with_upkeep
from sternway.pipeline.build._weights import Weights
from sternway.pipeline.faults._report import default_folder
from sternway.pipeline.step._copies import Copies
from sternway.pipeline.step._grads import Gradients, Tie, check_ties, resolve_ties
from sternway.pipeline.step._guard import Guard
from sternway.pipeline.step._microbatch import ChunkSpec
from sternway.pipeline.step._runner import StepRunner
from sternway.pipeline.step._scaler import GradScaler
from sternway.pipeline.step._slices import Slices
from sternway.pipeline.step._stage import LossFn, Stage
from sternway.pipeline.step._tuner import Tuner
from sternway.pipeline.transport._clock import clock_offsets
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._dist import default_transport
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._place import devices_of
from sternway.pipeline.transport._routes import Routes
from sternway.pipeline.transport._transport import Transport, device_of
from sternway.saved import Offload
from sternway.schedule import Schedule

Saved = AbstractContextManager[Any] | Callable[[int], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineArguments:
    """The arguments of ``Pipeline``, which describes them."""

    stages: Mapping[int, nn.Module] | nn.Module
    schedule: Schedule | str
    loss_fn: LossFn | None
    n_microbatches: int | None
    cuts: Sequence[str] | str
    sample: Any
    sample_target: Any
    memory_limit: float | None
    memory: int | str | None
    ranks: int | None
    transport: Transport | None
    tied: Sequence[Sequence[str]]
    skips: Mapping[str, tuple[int, int]] | None
    mesh: Any
    pp_dim: str
    data_dims: Sequence[str] | None
    cp_dim: str | None
    shard: ShardFn | None
    gathered: int | None
    chunk: ChunkSpec
    dynamic: bool
    saved: Saved | None
    offload_to: str | Path | None
    offload_rate: int | str | None
    scaler: GradScaler | None
    reduce_dtype: torch.dtype | None
    heartbeat_timeout: float
    reports: str | Path | None
    weights: Weights | None
    device: torch.device | str | None
    tune: bool
    cuda_graphs: bool


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """What a pipeline is made of.

    Attributes:
        transport: carries the messages.
        mesh: the dimensions of all copies and shards, if there are some.
        plan: as all ranks agreed on it.
        stages: this process's, by index.
        ties: the parameters with several names.
        gradients: of this process's parameters.
        guard: closes the pipeline after a failure.
        runner: runs the steps.
        tuner: changes the schedule between steps, if "auto" may.
    """

    transport: Transport
    mesh: PipelineMesh | None
    plan: BuildPlan
    stages: dict[int, Stage]
    ties: list[Tie]
    gradients: Gradients
    guard: Guard
    runner: StepRunner
    tuner: Tuner | None


@dataclass(frozen=True, slots=True)
class _Ground:
    """Where a pipeline runs."""

    transport: Transport
    mesh: PipelineMesh | None
    device: torch.device | None  # for weights that are to come
    ranks: int
    offload: Callable[[], Offload] | None  # makes what moves microbatches, if there is somewhere to go
    slices: Slices | None  # the processes that share this one's sequences, if there are some

    @property
    def ranks_here(self) -> tuple[int, ...]:
        return self.transport.mine or tuple(range(self.ranks))


def assemble(given: PipelineArguments) -> PipelineParts:
    """Build the parts of a pipeline. All ranks call it together.

    Raises:
        PipelineError: on every rank, if the arguments do not fit together.
    """
    ground = _ground(given)
    transport = ground.transport
    request = _request(given, ground)
    plan = agreed_plan(request, transport)
    crew = transport.crew() if ground.mesh is None else transport.crew_apart(ground.mesh.everyone)
    check_same_weights(given.stages, () if ground.mesh is None else ground.mesh.along(ground.mesh.data), crew.share)
    gathered = given.gathered if plan.gathered is None else plan.gathered
    if plan.schedule.recompute:
        transport.crew().agree(lambda: check_recompute(plan, given.cuda_graphs))
    own_ties = [] if plan.cut is None else plan.cut.ties()
    stages = _stages(given, ground, plan)
    schedule = with_upkeep(plan.schedule, stages, ground.mesh, gathered, transport, given.cuda_graphs)
    routes = Routes(schedule.num_stages, checked_skips(given.skips, schedule.num_stages))
    transport.connect(schedule, routes)
    check_ties(given.tied)
    placement = {rank: schedule.placement[rank] for rank in ground.ranks_here}
    ties = resolve_ties([*given.tied, *own_ties], stages, placement, transport)
    gradients = _gradients(given, ground, stages, ties)
    guard = Guard(transport, ground.ranks_here[0], Path(given.reports or default_folder()))
    tuner = make_tuner(plan, request, transport, schedule, gathered) if given.tune else None
    offsets = clock_offsets(transport, ground.ranks)
    runner = StepRunner(
        stages, schedule, routes, transport, ground.ranks_here, gradients, guard,
        given.chunk, offsets, plan.costs, tuner, ground.slices,
    )  # fmt: skip
    return PipelineParts(transport, ground.mesh, plan, stages, ties, gradients, guard, runner, tuner)


def _ground(given: PipelineArguments) -> _Ground:
    """Check the arguments one by one, and find the device, the mesh and the transport."""
    check_arguments(
        stages=given.stages, schedule=given.schedule, n_microbatches=given.n_microbatches, ranks=given.ranks,
        transport=given.transport, chunk=given.chunk, loss_fn=given.loss_fn, reports=given.reports, mesh=given.mesh,
        scaler=given.scaler, reduce_dtype=given.reduce_dtype, pp_dim=given.pp_dim, shard=given.shard,
        gathered=given.gathered, cp_dim=given.cp_dim,
    )  # fmt: skip
    check_weights(given.stages, given.weights, given.device)
    device = None if given.weights is None else device_of(given.device or "cpu")
    mesh = None if given.mesh is None else PipelineMesh(given.mesh, given.pp_dim, given.data_dims, given.cp_dim)
    check_plain(given.stages, mesh)
    transport = given.transport or default_transport(mesh, given.dynamic, given.heartbeat_timeout)
    transport.place(devices_of(given.stages) if device is None else [device])
    check_cuda_graphs(given.cuda_graphs, transport.device, given.saved)
    planned = given.schedule.ranks if isinstance(given.schedule, Schedule) else 0
    ranks = given.ranks or transport.ranks or planned
    if not ranks:
        raise PipelineError("a pipeline in one process needs the number of ranks", got="none", fix="pass ranks=")
    slices = None
    if mesh is not None and len(mesh.slices) > 1:
        slices = Slices(mesh.slices, transport.crew_apart(mesh.slices), transport.collective(mesh.slices))
        transport.crew().agree(partial(slices.check_sample, given.sample, given.sample_target))
    return _Ground(transport, mesh, device, ranks, make_policies(given.offload_to, transport.device), slices)


def _request(given: PipelineArguments, ground: _Ground) -> BuildRequest:
    """What decides the stages and the schedule."""
    memory, mesh = given.memory, ground.mesh
    movable = ground.offload if memory is not None and given.shard is None and not given.cuda_graphs else None
    return BuildRequest(
        given.stages,
        given.schedule,
        ground.ranks,
        given.n_microbatches,
        given.memory_limit,
        given.cuts,
        given.loss_fn,
        given.sample,
        given.sample_target,
        given.weights,
        ground.device,
        everyone=None if mesh is None else mesh.everyone,
        memory=None if memory is None else parse_bytes(memory, "memory", PipelineError),
        shard=given.shard,
        shards=counted_shards(given.shard, mesh, given.gathered, memory),
        tune=given.tune,
        gathered=given.gathered,
        link=shard_link(given.shard, mesh),
        offload=movable,
        offload_rate=given_rate(given.offload_rate, memory, movable=movable is not None),
    )


def _stages(given: PipelineArguments, ground: _Ground, plan: BuildPlan) -> dict[int, Stage]:
    """The stages of this process. Of a whole model, what other processes hold is let go first."""
    transport = ground.transport
    if plan.cut is not None and transport.mine:
        plan.cut.release(set(plan.modules))
    shard_stages(plan, given.shard, ground.mesh, transport)
    has_shards = given.mesh is not None and any(map(is_sharded, plan.modules.values()))
    transport.crew().agree(
        lambda: check_offload(
            plan.schedule,
            given.offload_to,
            transport.device,
            cuda_graphs=given.cuda_graphs,
            sharded=given.shard is not None or has_shards,
            chosen=given.memory is not None,
        )
    )
    movers = ground.offload if moves(plan.schedule) else None
    copies = _copies(given, ground, plan)
    return make_stages(plan, given.loss_fn, given.saved, given.scaler, given.cuda_graphs, movers, ground.slices, copies)


def _copies(given: PipelineArguments, ground: _Ground, plan: BuildPlan) -> Collective | None:
    """The processes that compute the loss of other rows, if this one computes that of some."""
    mesh = ground.mesh
    if mesh is None or given.loss_fn is None or plan.schedule.num_stages - 1 not in plan.modules:
        return None
    data = mesh.along(mesh.data)
    return ground.transport.collective(data) if len(data) > len(mesh.slices) else None


def _gradients(
    given: PipelineArguments, ground: _Ground, stages: Mapping[int, Stage], ties: Sequence[Tie]
) -> Gradients:
    """What sums, averages and measures gradients over processes."""
    transport, mesh = ground.transport, ground.mesh
    copies = peers = None
    if mesh is not None:
        copies = Copies(mesh, stages, transport.collective, given.reduce_dtype)
        if any(isinstance(p, DTensor) for stage in stages.values() for p in stage.module.parameters()):
            peers = transport.collective(mesh.peers)
    gradients = Gradients(stages, ties, transport, ground.ranks, copies, mesh, peers, given.reduce_dtype)
    if given.scaler is not None:
        given.scaler.connect(gradients.add_up, transport.device)
    return gradients
