"""Stages whose parameters are sharded: shard those of a whole model, and put their upkeep into the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from sternway import schedule as schedules
from sternway._bytes import show_bytes
from sternway._storage import storage_bytes
from sternway._torch.dtensors import local_part
from sternway.errors import PipelineError
from sternway.pipeline.build._link import ShardLink
from sternway.pipeline.build._plan import BuildPlan
from sternway.pipeline.build._rank_bytes import Shards
from sternway.pipeline.build._shard_stage import ShardFn, shard_stages_of
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Schedule, Upkeep

_UNEVEN = 0.05  # by which a shard may be larger than the others


def counted_shards(
    shard: ShardFn | None, mesh: PipelineMesh | None, gathered: int | None, memory: Any
) -> Shards | None:
    """How ``memory=`` counts what ``shard`` will shard; None if there is nothing to count, or nothing sharded."""
    if shard is None or mesh is None or memory is None:
        return None
    if "dp_shard" not in mesh.names:
        raise PipelineError(
            'memory counts what shard= shards over a dimension "dp_shard" of the mesh',
            got=f"the dimensions {mesh.names}",
            fix="name the dimension so, or leave memory= out",
        )
    return Shards(len(mesh.along(["dp_shard"])), gathered)


def shard_link(shard: ShardFn | None, mesh: PipelineMesh | None) -> ShardLink | None:
    """What will gather and reduce the stages; None if it is not known."""
    if shard is None or mesh is None or "dp_shard" not in mesh.names or len(mesh.along(["dp_shard"])) == 1:
        return None
    return ShardLink(mesh.group("dp_shard"))


def shard_stages(plan: BuildPlan, shard: ShardFn | None, mesh: PipelineMesh | None, transport: Transport) -> None:
    """Call ``shard`` on each stage that was cut from a whole model, once others have let go of it."""
    if shard is None:
        return

    def apply() -> None:
        if plan.cut is None or mesh is None:
            raise PipelineError(
                "shard is for a whole model that is cut over a mesh",
                got="stages that were passed one by one" if plan.cut is None else "no mesh=",
                fix="call fully_shard on these stages yourself" if plan.cut is None else "pass mesh=",
            )
        if plan.cut.crossing is None:
            raise PipelineError(
                "shard needs to know what the stages use", got="no sample=", fix="pass sample=, one microbatch"
            )
        shard_stages_of(plan.cut.model, list(plan.modules.values()), shard)
        _check_counted(plan, transport)

    transport.crew().agree(apply)


def _check_counted(plan: BuildPlan, transport: Transport) -> None:
    """Raise if stages hold more than was counted under ``memory=``: not all of them is sharded."""
    if plan.room is None or plan.room.shards is None or not transport.mine:
        return
    counted = plan.room.ranks(plan.schedule)[transport.mine[0]].parameters
    tensors = (t for module in plan.modules.values() for t in (*module.parameters(), *module.buffers()))
    held = storage_bytes(local_part(tensor) for tensor in tensors)
    if held > (1 + _UNEVEN) * counted:
        raise PipelineError(
            "shard must shard all parameters of a stage, if memory= is to count them",
            got=f"{show_bytes(held)} of parameters here, where {show_bytes(counted)} were counted",
            fix="shard every module of the stage, or leave memory= out",
        )


def whole_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with sharded tensors as whole ones. All processes that share them call it."""
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}


def with_upkeep(
    plan: Schedule,
    stages: Mapping[int, Stage],
    mesh: PipelineMesh | None,
    gathered: int | None,
    transport: Transport,
    cuda_graphs: bool,
) -> Schedule:
    """The schedule with what the sharded stages of all ranks need, after a look at the dimensions of the mesh."""
    if mesh is None:
        if gathered is not None:
            raise PipelineError("gathered is for sharded stages", got="no mesh=", fix="leave it out, or pass mesh=")
        return plan
    here = [index for index, stage in stages.items() if stage.shards is not None]
    used = {name for stage in stages.values() for p in stage.module.parameters() for name in mesh.spanned(p)}
    rows = transport.crew().share((here, used))
    mesh.check_used({name for _, names in rows for name in names})
    sharded = {index for indices, _ in rows for index in indices}
    if sharded and cuda_graphs:
        raise PipelineError(
            "cuda_graphs=True cannot have sharded stages: their parameters are in other memory in every step",
            got=f"the stages {sorted(sharded)}, sharded by fully_shard",
            fix="leave cuda_graphs out, or pass plain stages",
        )
    planned = {step.stage for steps in plan.actions for step in steps if isinstance(step, Upkeep)}
    if not planned:
        return schedules.sharded(plan, stages=sharded, gathered=gathered) if sharded else plan
    if not sharded <= planned or gathered is not None:
        raise PipelineError(
            "a schedule with upkeep must have that of every sharded stage, and no gathered= beside it",
            got=f"upkeep of the stages {sorted(planned)}, where {sorted(sharded)} are sharded",
            fix="pass the schedule without upkeep, or schedule.sharded(schedule)",
        )
    return plan
