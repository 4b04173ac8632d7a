"""From the arguments of ``Pipeline`` to a plan: which stages there are, which of them are here, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline.build._partition import Layout, lay_out, layout_of, weights
from sternway.pipeline.build._profile import Profile, profile
from sternway.pipeline.build._weights import Weights, fill, on_zeros
from sternway.pipeline.forward._part import CutModel, ModelPart
from sternway.pipeline.step._stage import LossFn
from sternway.pipeline.transport._crew import Outcome
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments of ``Pipeline`` that decide the stages and the schedule."""

    stages: Mapping[int, nn.Module] | nn.Module
    schedule: Schedule | str
    ranks: int
    n_microbatches: int | None = None
    memory_limit: float | None = None
    cuts: Sequence[str] | str = "balanced"
    loss_fn: LossFn | None = None
    sample: Any = None
    sample_target: Any = None
    weights: Weights | None = None
    device: torch.device | None = None


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
    """

    modules: dict[int, nn.Module]
    schedule: Schedule
    costs: Costs
    cuts: tuple[str, ...] | None = None
    profile: Profile | None = None
    cut: CutModel | None = None

    def peak_bytes(self) -> list[int] | None:
        """The most bytes of activations that each rank holds at once by this plan, if they were measured."""
        if self.profile is None:
            return None
        curves = self.schedule.simulate().memory_of(self.profile.bytes_after_F, self.profile.bytes_after_I)
        return [int(max(level for _, level in curve)) for curve in curves]


def make_plan(request: BuildRequest, transport: Transport) -> BuildPlan:
    """The plan for this process. On all ranks the schedule is the same."""
    if isinstance(request.stages, nn.Module):
        return _from_model(request, request.stages, transport)
    return _from_stages(request, request.stages)


def _from_stages(request: BuildRequest, stages: Mapping[int, nn.Module]) -> BuildPlan:
    """Stages passed one by one: the schedule must place exactly these here."""
    bad = [key for key, module in stages.items() if not isinstance(key, int) or not isinstance(module, nn.Module)]
    if bad or not stages:
        raise PipelineError(
            "stages must be {stage index: module}",
            got=f"the entries {bad}" if bad else "none",
            fix="pass at least one",
        )
    return BuildPlan(dict(stages), _schedule(request, Costs()), Costs())


def _from_model(request: BuildRequest, model: nn.Module, transport: Transport) -> BuildPlan:
    """A whole model: cut it, and keep this process's stages."""
    counts = _stage_counts(request)
    named = _named_cuts(request)
    layout = _agreed_layout(request, model, min(counts), named, transport)
    measured = None if request.weights is not None else _measure(request, model, layout, transport)
    if named is not None:
        ways = [layout.starts(named)]
    else:
        costs = weights(model, layout) if measured is None else measured.totals
        counts = [count for count in counts if count <= len(layout.names)] or counts[:1]
        ways = [layout.balanced(costs, count) for count in counts]
    options = [_option(request, starts, measured) for starts in ways]
    best = min(options, key=lambda option: option.cost())
    cut = layout.cut(model, best.starts)
    here = [stage for rank in transport.mine or range(request.ranks) for stage in best.schedule.placement[rank]]
    if request.weights is not None:
        names = [name for index in here for name in ModelPart(cut, index).state_dict()]
        fill(model, names, request.weights, request.device or torch.device("cpu"))
        cut = layout.cut(model, best.starts)  # of the parameters that are there now
    return BuildPlan(
        {index: ModelPart(cut, index) for index in here},
        best.schedule,
        best.costs,
        tuple(layout.names[start] for start in best.starts[1:]),
        None if measured is None else measured.grouped(best.starts),
        cut,
    )


def _named_cuts(request: BuildRequest) -> Sequence[str] | None:
    """The modules at which stages begin, if they are named."""
    cuts = request.cuts
    if isinstance(cuts, str):
        if cuts != "balanced":
            raise PipelineError('cuts must be module names, or "balanced"', got=repr(cuts), fix='pass cuts="balanced"')
        return None
    PipelineError.unless(
        isinstance(cuts, Sequence) and all(isinstance(name, str) for name in cuts),
        'cuts must be names of modules that the forward calls, or "balanced"',
        cuts,
        "pass a list of names",
    )
    return cuts


def _stage_counts(request: BuildRequest) -> list[int]:
    """The numbers of stages that are compared: for "auto" one on each rank, and two; else that of the schedule."""
    wanted, ranks = request.schedule, request.ranks
    if isinstance(wanted, Schedule):
        return [wanted.num_stages]
    if wanted == "auto":
        return [ranks, 2 * ranks]
    return [schedules.make(wanted, ranks=ranks, microbatches=request.n_microbatches or ranks).num_stages]


def _agreed_layout(
    request: BuildRequest, model: nn.Module, count: int, named: Sequence[str] | None, transport: Transport
) -> Layout:
    """Where the model can be cut: as the first rank finds, so that all decide alike."""

    def find() -> Layout:
        if request.weights is not None and request.sample is None:
            raise PipelineError(
                "a model without weights needs a sample, on the first rank",
                got="none",
                fix="pass sample=, arguments of the model: one row",
            )
        whole = model if request.weights is None else on_zeros(model)
        return lay_out(whole, request.sample, wanted=count, named=named or ())

    if not transport.mine:
        return find()
    found: Outcome[Layout | None] = Outcome(find) if transport.mine == (0,) else Outcome.of(None)
    layout = transport.crew().share(found)[0].result()
    assert layout is not None, "the first rank has found it"
    return layout


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to cut the model, with the schedule for it."""

    starts: list[int]
    schedule: Schedule
    costs: Costs

    def cost(self) -> tuple[float, float]:
        """The time of a step among others, and that of one alone."""
        timeline = self.schedule.simulate(self.costs)
        return timeline.period, timeline.makespan


def _option(request: BuildRequest, starts: list[int], measured: Profile | None) -> _Option:
    costs = measured.grouped(starts).costs if measured is not None else Costs()
    plan = _schedule(request, costs, stages_per_rank=max(1, len(starts) // request.ranks))
    if plan.num_stages != len(starts):
        raise PipelineError(
            f"schedule {plan.name} needs {plan.num_stages} stages",
            got=f"{len(starts)} from cuts={request.cuts!r}",
            fix=f'pass {plan.num_stages - 1} cuts, or cuts="balanced"',
        )
    return _Option(starts, plan, costs)


def _schedule(request: BuildRequest, costs: Costs, stages_per_rank: int = 1) -> Schedule:
    """The schedule that was passed, or made by its name; for "auto" the best that a search finds."""
    wanted, ranks, microbatches = request.schedule, request.ranks, request.n_microbatches
    if isinstance(wanted, Schedule):
        return wanted
    if microbatches is None:
        raise PipelineError(
            "a schedule given by name needs n_microbatches", got=repr(wanted), fix="pass n_microbatches="
        )
    if wanted != "auto":
        return schedules.make(wanted, ranks=ranks, microbatches=microbatches)
    return schedules.search(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=2 * ranks * max(1.0, costs.memory_after_I)
        if request.memory_limit is None
        else request.memory_limit,
        stages_per_rank=stages_per_rank,
    )


def _measure(request: BuildRequest, model: nn.Module, layout: Layout, transport: Transport) -> Profile | None:
    """What the first rank measured, on all ranks, so that all decide alike; None if it has no sample.

    All ranks with a sample measure at the same time, as they will train: cores share caches and memory.
    """

    def measure() -> Profile | None:
        if request.sample is None:
            return None
        loss_fn = request.loss_fn if request.sample_target is not None else None
        calls = layout.cut(model, range(len(layout.names))).parts()
        found = profile(calls, request.sample, loss_fn=loss_fn, target=request.sample_target)
        return replace(found, names=tuple(layout.names))

    found = transport.crew().share(Outcome(measure))[0].result()
    return None if found is None else replace(found, comm=transport.delay(max(found.sent_bytes)))


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
