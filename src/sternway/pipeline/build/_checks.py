"""Checks of the arguments of ``Pipeline``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from sternway.errors import PipelineError
from sternway.pipeline.build._blocks import STATEFUL
from sternway.pipeline.build._plan import BuildPlan
from sternway.pipeline.build._request import BuildRequest, check_copies
from sternway.pipeline.build._weights import is_empty
from sternway.pipeline.step._microbatch import ChunkSpec
from sternway.pipeline.step._scaler import GradScaler
from sternway.pipeline.transport._mesh import PipelineMesh
from sternway.pipeline.transport._routes import MAIN
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule

EPSILON = 1e-9  # rounding


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 1)


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "stages": ("be {index: module}, or a whole model", lambda value: isinstance(value, Mapping | nn.Module)),
    "schedule": ('be a Schedule, the name of one, or "auto"', lambda value: isinstance(value, Schedule | str)),
    "n_microbatches": ("be a number from 1 on", _is_count),
    "ranks": ("be a number from 1 on", _is_count),
    "transport": ("be a Transport", lambda value: isinstance(value, Transport | None)),
    "chunk": ("be Chunk(dim), Presplit() or Replicate()", lambda value: isinstance(value, ChunkSpec)),
    "loss_fn": ("be a function of output and target", lambda value: value is None or callable(value)),
    "scaler": ("be a sternway.pipeline.GradScaler", lambda value: isinstance(value, GradScaler | None)),
    "reduce_dtype": (
        "be a floating dtype",
        lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
    ),
    "mesh": ("be a DeviceMesh", lambda value: value is None or hasattr(value, "get_group")),
    "shard": ("be a function of a stage", lambda value: value is None or callable(value)),
    "gathered": ("be a number from 1 on", _is_count),
    "pp_dim": ("be a name", lambda value: isinstance(value, str)),
    "cp_dim": ("be a name", lambda value: isinstance(value, str | None)),
    "reports": ("be a folder", lambda value: isinstance(value, str | os.PathLike | None)),
}


def check_arguments(**arguments: Any) -> None:
    """Raise unless each of these arguments of ``Pipeline`` has the right type."""
    for name, value in arguments.items():
        rule, fits = _RULES[name]
        if not fits(value):
            got = f"{type(value).__name__} {value!r:.80}"
            raise PipelineError(f"{name} must {rule}", got=got, fix="see the arguments of Pipeline")
        if name == "schedule":
            check_copies(value)


def check_weights(stages: Any, weights: Any, device: Any) -> None:
    """Raise unless a model without weights, and only such a model, comes with a function that gives them."""
    if weights is None:
        if is_empty(stages):
            raise PipelineError(
                "a model on the meta device has no weights",
                got="no weights=",
                fix="pass weights=, use pipeline.from_pretrained, or make the model on another device",
            )
        if device is not None:
            raise PipelineError("device is for models without weights", got=str(device), fix="move the model there")
        return
    PipelineError.unless(callable(weights), "weights must be a function of names", weights, "pass a function")
    if not is_empty(stages):
        raise PipelineError(
            "weights are for a whole model whose parameters are on the meta device",
            got=type(stages).__name__,
            fix="leave weights= out, or make the model in a block torch.device('meta')",
        )


def check_cuda_graphs(cuda_graphs: Any, device: torch.device, saved: Any) -> None:
    """Raise if CUDA graphs are asked for and cannot be."""
    PipelineError.unless(type(cuda_graphs) is bool, "cuda_graphs must be True or False", cuda_graphs, "pass one")
    if cuda_graphs and device.type != "cuda":
        raise PipelineError(
            "cuda_graphs=True needs stages on a CUDA device",
            got=f"stages on {device}",
            fix="move them to a GPU, or leave cuda_graphs out",
        )
    if cuda_graphs and saved is not None:
        raise PipelineError(
            "cuda_graphs=True cannot have saved=: a graph keeps what it saves in its own memory",
            got=f"saved={type(saved).__name__}",
            fix="leave one of them out",
        )


def check_plain(stages: Any, mesh: PipelineMesh | None) -> None:
    """Raise if a stage is sharded in a way that a pipeline cannot run: its gradients and checkpoints would be wrong.

    Parameters may be DTensors on other dimensions of the mesh than the pipeline's own.
    """
    for module in [stages] if isinstance(stages, nn.Module) else stages.values():
        if not isinstance(module, nn.Module):
            continue
        old = [name for name, each in module.named_modules() if isinstance(each, FullyShardedDataParallel)]
        if old:
            raise PipelineError(
                "a pipeline cannot have stages that FSDP1 has sharded",
                got=old[0] or type(module).__name__,
                fix="use fully_shard (docs/sharded.md)",
            )
        named = dict(module.named_modules())
        units = [name for name, each in named.items() if isinstance(each, FSDPModule)]
        if units and isinstance(stages, nn.Module):
            raise PipelineError(
                "fully_shard must be called on stages, not on a whole model before it is cut",
                got=units[0] or type(module).__name__,
                fix="pass the model as it is, and shard=, which is called on each stage",
            )
        by_fsdp = {id(parameter) for name in units for parameter in named[name].parameters()}
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                _check_mesh_of(name, parameter, mesh, id(parameter) in by_fsdp)


def _check_mesh_of(name: str, parameter: DTensor, mesh: PipelineMesh | None, by_fsdp: bool) -> None:
    """Raise unless a parameter's mesh is a part of the pipeline's that has no two of its ranks."""
    ranks = set(parameter.device_mesh.mesh.flatten().tolist())
    got = f"{name}, a DTensor on the ranks {sorted(ranks)}"
    if mesh is None:
        raise PipelineError(
            "a pipeline of sharded stages needs the mesh of all their ranks",
            got=f"{got}, and no mesh=",
            fix="pass mesh=, a DeviceMesh with a dimension of the pipeline's ranks, and those of the parameters",
        )
    if not ranks <= set(mesh.everyone) or len(ranks.intersection(mesh.pipeline)) > 1:
        raise PipelineError(
            "the parameters of a stage must be sharded over ranks that hold the same stage",
            got=f"{got}; the pipeline has the ranks {mesh.pipeline}",
            fix='shard over other dimensions of mesh=, as parallelize_module(stage, mesh["tp"], …) does',
        )
    if not mesh.names_data and mesh.summed(parameter, by_fsdp) > 1:
        raise PipelineError(
            "parameters that fully_shard has not sharded must not be sharded along a dimension of different data",
            got=f"{got}; data differ along {mesh.data}",
            fix="use a dimension of its own for tensor parallelism; name data_dims= if these are experts",
        )


def check_recompute(plan: BuildPlan, cuda_graphs: bool) -> None:
    """Raise if a stage that was passed as it is cannot run its forward twice."""
    for index, share in plan.schedule.shares.items() if plan.cut is None else ():
        if share.whole < 1:
            some = f"{share.whole:g} of stage {index}" + (f", {share.selective:g} selectively" * bool(share.selective))
            raise PipelineError(
                "a stage that was passed as it is can be recomputed as a whole, not in part",
                got=some,
                fix=f"pass the whole model, or recompute={index}, or use torch.utils.checkpoint inside the stage",
            )
        modules = list(plan.modules[index].modules()) if index in plan.modules else []
        stateful = next((type(module).__name__ for module in modules if isinstance(module, STATEFUL)), None)
        sharded = next((type(module).__name__ for module in modules if isinstance(module, FSDPModule)), None)
        got = stateful or sharded or ("cuda_graphs=True" if cuda_graphs else None)
        if got is not None:
            raise PipelineError(
                f"stage {index} cannot be recomputed: it must not change buffers, be sharded or be captured",
                got=got,
                fix=f"leave {index} out of the schedule's recompute, or use torch.utils.checkpoint inside the stage",
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded a part of a module."""
    return any(isinstance(each, FSDPModule) for each in module.modules())


def check_placement(plan: BuildPlan, request: BuildRequest, transport: Transport) -> None:
    """Raise unless the schedule is valid, for these ranks, within the memory, and places just these stages here."""
    schedule, ranks, limit = plan.schedule.check(), request.ranks, request.memory_limit
    if schedule.ranks != ranks:
        raise PipelineError(
            f"schedule {schedule.name} is for {schedule.ranks} ranks",
            got=f"{ranks} ranks",
            fix="make one for that many",
        )
    peak = schedule.simulate(plan.costs).peak_memory
    if limit is not None and peak > limit + EPSILON:
        raise PipelineError(
            f"schedule {schedule.name} cannot keep to memory_limit={limit:g}",
            got=f"activations of {peak:g} microbatches on a rank",
            fix='pass schedule="auto", which keeps to it, or a larger limit',
        )
    for rank in transport.mine or range(ranks):
        missing = [stage for stage in schedule.placement[rank] if stage not in plan.modules]
        if missing:
            raise PipelineError(
                f"rank {rank} must hold the stages {list(schedule.placement[rank])}, where {schedule.name} places them",
                got=f"no stage {missing[0]}, but {sorted(plan.modules)}",
                fix="pass {index: module} for each of them",
            )
    if request.schedule == "auto" and not request.tune and plan.costs == Costs() and transport.mine and ranks > 1:
        raise PipelineError(
            '"auto" must know what stages cost: from a sample, or from its first steps',
            got="no sample=, and tune=False",
            fix="pass sample=, one microbatch of a whole model, leave tune=False out, or name a schedule",
        )
    mine = {stage for rank in transport.mine or range(ranks) for stage in schedule.placement[rank]}
    extra = sorted(plan.modules.keys() - mine)
    if extra:
        raise PipelineError(
            f"{schedule.name} places only the stages {sorted(mine)} here",
            got=f"stage {extra[0]} too",
            fix="leave it out",
        )


def checked_skips(skips: Mapping[str, tuple[int, int]] | None, num_stages: int) -> dict[str, tuple[int, int]]:
    """The skips, if each leads from a stage to a later one."""
    if skips is None:
        return {}
    rule = "skips must be {name: (from stage, to stage)}"
    PipelineError.unless(isinstance(skips, Mapping), rule, skips, "pass a dict")
    for name, way in skips.items():
        fits = isinstance(name, str) and isinstance(way, tuple | list) and [type(part) for part in way] == [int, int]
        PipelineError.unless(fits, rule, (name, way), "pass the numbers of two stages")
        source, target = way
        if name == MAIN or not 0 <= source < target < num_stages:
            raise PipelineError(
                f"a skip must lead from a stage to a later one, of {num_stages}",
                got=f"{name}: from {source} to {target}",
                fix='name stages in order, and the skip anything but "main"',
            )
    return dict(skips)
