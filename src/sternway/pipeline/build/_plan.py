"""From the arguments of ``Pipeline`` to a plan: which stages there are, which of them are here, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sternway.errors import PipelineError
from sternway.pipeline.build._best_option import PlanOption, limit_of, schedule_of
from sternway.pipeline.build._blocks import recompute_stages
from sternway.pipeline.build._offload import moves
from sternway.pipeline.build._options import Draft, stages_here
from sternway.pipeline.build._partition import lay_out, layout_of, weights
from sternway.pipeline.build._profile import Profile
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.build._room import Room
from sternway.pipeline.build._weights import fill
from sternway.pipeline.forward._cut_model import CutModel
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a pipeline runs.

    Attributes:
        modules: the stages of this process's ranks.
        schedule: of all ranks.
        costs: those that it was planned for.
        cuts: the modules of a whole model at which stages begin; None if stages were passed one by one.
        profile: what was measured, one entry for each stage; None if nothing was.
        cut: the whole model, cut; None if stages were passed one by one.
        limit: how many microbatches' activations another plan for "auto" may keep; one number, or one for each rank.
        room: the bytes of a rank, if they are limited.
        gathered: how many sharded stages a rank keeps gathered; None for all.
    """

    modules: dict[int, nn.Module]
    schedule: Schedule
    costs: Costs
    cuts: tuple[str, ...] | None = None
    profile: Profile | None = None
    cut: CutModel | None = None
    limit: float | Sequence[float] = 0.0
    room: Room | None = None
    gathered: int | None = None

    def peak_bytes(self) -> list[int] | None:
        """The most bytes of activations that each rank holds at once by this plan, if they were measured.

        None with stages that are recomputed or microbatches that are offloaded, which were measured as they are
        otherwise.
        """
        if self.profile is None or self.schedule.recompute or moves(self.schedule):
            return None
        curves = self.schedule.simulate().memory_of(self.profile.bytes_after_F, self.profile.bytes_after_I)
        return [int(max(level for _, level in curve)) for curve in curves]


def make_plan(request: BuildRequest, transport: Transport, draft: Draft | None, best: PlanOption | None) -> BuildPlan:
    """The plan for this process. On all ranks the schedule is the same."""
    if draft is None or best is None:
        assert isinstance(request.stages, Mapping)
        return _from_stages(request, request.stages)
    assert isinstance(request.stages, nn.Module)
    return _from_model(request, request.stages, transport, draft, best)


def _from_stages(request: BuildRequest, stages: Mapping[int, nn.Module]) -> BuildPlan:
    """Stages passed one by one: the schedule must place exactly these here."""
    bad = [key for key, module in stages.items() if not isinstance(key, int) or not isinstance(module, nn.Module)]
    if bad or not stages:
        raise PipelineError(
            "stages must be {stage index: module}",
            got=f"the entries {bad}" if bad else "none",
            fix="pass at least one",
        )
    if request.memory is not None:
        raise PipelineError("memory needs a whole model, to count what it takes", got="stages", fix="pass the model")
    limit = limit_of(request, Costs())
    return BuildPlan(dict(stages), schedule_of(request, Costs(), limit), Costs(), limit=limit)


def _from_model(
    request: BuildRequest, model: nn.Module, transport: Transport, draft: Draft, best: PlanOption
) -> BuildPlan:
    """A whole model: cut it, and keep this process's stages."""
    layout, measured = draft.layout, draft.measured
    recompute_stages(model, layout, best.starts, best.schedule.shares)
    cut = layout.cut(model, best.starts)
    here = stages_here(request, transport, best.schedule)
    if request.weights is not None:
        names = [name for index in here for name in _names(ModelPart(cut, index))]
        fill(model, names, request.weights, request.device or torch.device("cpu"))
        cut = layout.cut(model, best.starts)  # of the parameters that are there now
    return BuildPlan(
        {index: ModelPart(cut, index) for index in here},
        best.schedule,
        best.costs,
        tuple(layout.names[start] for start in best.starts[1:]),
        None if measured is None else measured.grouped(best.starts),
        cut,
        best.limit,
        best.room,
        best.gathered,
    )


def _names(part: nn.Module) -> list[str]:
    """What a stage needs values for: its state, and buffers that are not saved, if they are on meta."""
    state = part.state_dict()
    return [*state, *(name for name, each in part.named_buffers() if each.is_meta and name not in state)]


def partition(
    model: nn.Module, *, ranks: int, stages_per_rank: int = 1, costs: Profile | None = None, sample: Any = None
) -> list[nn.Module]:
    """Cut a model into stages of equal cost, as far as possible.

    The first stage is called with the model's arguments, each other one with what the stage before returned, as
    ``stage(*returned)``. The last one returns what the model returns.

    Args:
        model: any model. Without a sample, one whose forward calls its modules in the order in which it has them.
        ranks: the number of ranks.
        stages_per_rank: the number of stages on each.
        costs: what ``profile(model, sample)`` measured. Without it parameters are counted, but not embedding tables.
        sample: one microbatch, from which it is found what the forward calls.
    """
    PipelineError.unless(isinstance(model, nn.Module), "model must be an nn.Module", model, "pass the model")
    for name, count in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
        PipelineError.unless(
            type(count) is int and count >= 1, f"{name} must be a number from 1 on", count, "pass 1 or more"
        )
    PipelineError.unless(
        costs is None or isinstance(costs, Profile), "costs must be a Profile", costs, "pass profile(model, …)"
    )
    count = ranks * stages_per_rank
    named = [] if costs is None else list(dict.fromkeys(costs.names))
    layout = lay_out(model, sample, wanted=count if costs is None else 1, named=named)
    if costs is not None and layout.names != list(costs.names):
        layout = layout_of(costs.names)
    found = weights(model, layout) if costs is None else costs.totals
    return list(layout.cut(model, layout.balanced(found, count)).parts())
