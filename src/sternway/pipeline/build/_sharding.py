"""Stages whose parameters are sharded: shard those of a whole model, and put their upkeep into the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline.build._plan import BuildPlan
from sternway.pipeline.step._stage import Stage
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Schedule, Upkeep

ShardFn = Callable[[nn.Module], Any]
"""Calls ``fully_shard`` on a stage, or on modules of it."""


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
        for index, module in plan.modules.items():
            shard(module)
            _check_same(plan.cut.model, index, module)

    transport.crew().agree(apply)


def _check_same(model: nn.Module, index: int, stage: nn.Module) -> None:
    """Raise if a parameter was replaced in the stage only, and the model's own code would use the old one."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in stage.named_parameters():
        if whole.get(name) is not parameter:
            raise PipelineError(
                "shard cannot replace a parameter that the model's forward uses outside of the modules it calls",
                got=f"{name} of stage {index}",
                fix="call fully_shard on the blocks of a stage, or pass ignored_params= with that parameter",
            )


def with_upkeep(
    plan: Schedule,
    stages: Mapping[int, Stage],
    mesh: PipelineMesh | None,
    gathered: int | None,
    transport: Transport,
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
