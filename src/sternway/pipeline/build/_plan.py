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
from sternway.pipeline.build._rehearse import Rehearsal
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
    everyone: Sequence[int] | None = None  # the processes of all copies of the pipeline, if there are copies


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
        after_f, after_i = self.profile.bytes_after_F, self.profile.bytes_after_I
        peaks = []
        for steps in self.schedule.actions:
            held = peak = 0
            for action in (action for step in steps for action in step.actions):
                stage = action.stage
                if action.op == "F":
                    held += after_f[stage]
                elif action.op == "I":
                    held += after_i[stage] - after_f[stage]
                else:
                    held -= after_i[stage] if action.op == "W" else after_f[stage]
                peak = max(peak, held)
            peaks.append(peak)
        return peaks


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to cut the model, with the schedule for it."""

    starts: list[int]
    schedule: Schedule
    costs: Costs

    def cost(self) -> tuple[float, float]:
        """The time of a step among others, and that of one alone."""
        timeline = self.schedule.simulate(self.costs)
        return timeline.period, timeline.makespan


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a whole model before its plan is chosen. It is the same on all ranks."""

    layout: Layout
    measured: Profile | None
    options: list[PlanOption]


def draft_plans(request: BuildRequest, transport: Transport) -> Draft | None:
    """The ways to cut a whole model, each with its schedule; None if stages were passed one by one."""
    if not isinstance(request.stages, nn.Module):
        return None
    model, counts, named = request.stages, _stage_counts(request), _named_cuts(request)
    layout = _agreed_layout(request, model, min(counts), named, transport)
    measured = None if request.weights is not None else _measure(request, model, layout, transport)
    if named is not None:
        ways = [layout.starts(named)]
    else:
        costs = weights(model, layout) if measured is None else measured.totals
        if measured is None:  # nobody knows what messages cost, and two stages on each rank send twice as many
            counts = counts[:1]
        counts = [count for count in counts if count <= len(layout.names)] or counts[:1]
        ways = [layout.balanced(costs, count) for count in counts]
    return Draft(layout, measured, [_option(request, starts, measured) for starts in ways])


def choose(request: BuildRequest, draft: Draft, transport: Transport) -> PlanOption:
    """The best way to cut the model: by simulation, or in steps with the sample if there are processes to run them.

    Copies of a pipeline take what the first one finds. If a step fails, the transport is closed on all ranks.
    """
    if draft.measured is None or not transport.mine or len(draft.options) == 1:
        return min(draft.options, key=lambda option: option.cost())
    assert isinstance(request.stages, nn.Module)
    rehearsal = Rehearsal(transport, request.sample, request.sample_target, request.loss_fn)
    spans = []
    for option in draft.options:
        cut = draft.layout.cut(request.stages, option.starts)
        parts = {index: ModelPart(cut, index) for index in _stages_here(request, transport, option.schedule)}
        spans.append(rehearsal.span(parts, option.schedule, option.costs, limit_of(request, option.costs)))
    if request.everyone is not None:
        spans = transport.crew_apart(request.everyone).share(spans)[0]
    return draft.options[spans.index(min(spans))]


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
    return BuildPlan(dict(stages), _schedule(request, Costs()), Costs())


def _from_model(
    request: BuildRequest, model: nn.Module, transport: Transport, draft: Draft, best: PlanOption
) -> BuildPlan:
    """A whole model: cut it, and keep this process's stages."""
    layout, measured = draft.layout, draft.measured
    cut = layout.cut(model, best.starts)
    here = _stages_here(request, transport, best.schedule)
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


def _stages_here(request: BuildRequest, transport: Transport, schedule: Schedule) -> list[int]:
    """The stages of this process's ranks."""
    return [stage for rank in transport.mine or range(request.ranks) for stage in schedule.placement[rank]]


def _option(request: BuildRequest, starts: list[int], measured: Profile | None) -> PlanOption:
    costs = measured.grouped(starts).costs if measured is not None else Costs()
    plan = _schedule(request, costs, stages_per_rank=max(1, len(starts) // request.ranks))
    if plan.num_stages != len(starts):
        raise PipelineError(
            f"schedule {plan.name} needs {plan.num_stages} stages",
            got=f"{len(starts)} from cuts={request.cuts!r}",
            fix=f'pass {plan.num_stages - 1} cuts, or cuts="balanced"',
        )
    return PlanOption(starts, plan, costs)


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
        memory_limit=limit_of(request, costs),
        stages_per_rank=stages_per_rank,
    )


def limit_of(request: BuildRequest, costs: Costs) -> float:
    """What a rank may keep under "auto", in forwards of one microbatch."""
    if request.memory_limit is not None:
        return request.memory_limit
    return 2 * request.ranks * max(1.0, costs.memory_after_I)


def _measure(request: BuildRequest, model: nn.Module, layout: Layout, transport: Transport) -> Profile | None:
    """What the first rank measured, on all ranks, so that all decide alike; None if it has no sample.

    All ranks with a sample measure at the same time, as they will train: cores share caches and memory. Copies of the
    pipeline take what the first one measured: they average stage after stage, in the order of one schedule.
    """

    def measure() -> Profile | None:
        if request.sample is None:
            return None
        loss_fn = request.loss_fn if request.sample_target is not None else None
        calls = layout.cut(model, range(len(layout.names))).parts()
        found = profile(calls, request.sample, loss_fn=loss_fn, target=request.sample_target)
        return replace(found, names=tuple(layout.names))

    crew = transport.crew() if request.everyone is None else transport.crew_apart(request.everyone)
    found = crew.share(Outcome(measure))[0].result()
    return None if found is None else replace(found, comm=crew.share(transport.delay(max(found.sent_bytes)))[0])


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
