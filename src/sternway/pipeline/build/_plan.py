"""From the arguments of ``Pipeline`` to a plan: which stages there are, which of them are here, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline.build._partition import balance, called_modules, split_model
from sternway.pipeline.build._profile import Profile, profile
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


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a pipeline runs.

    Attributes:
        modules: the stages of this process's ranks.
        schedule: of all ranks.
        costs: those that it was planned for.
        cuts: the modules of a whole model at which stages begin; None if stages were passed one by one.
        profile: what was measured, one entry for each stage; None if nothing was.
    """

    modules: dict[int, nn.Module]
    schedule: Schedule
    costs: Costs
    cuts: tuple[str, ...] | None = None
    profile: Profile | None = None

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
    names = called_modules(model)
    measured = _measure(request, model, transport)
    options = [_option(request, starts, measured) for starts in _cuts(request, model, names, measured)]
    best = min(options, key=lambda option: option.cost())
    cuts = tuple(names[start] for start in best.starts[1:])
    stages = split_model(model, cuts)
    here = [stage for rank in transport.mine or range(request.ranks) for stage in best.schedule.placement[rank]]
    grouped = None if measured is None else measured.grouped(best.starts)
    return BuildPlan({index: stages[index] for index in here}, best.schedule, best.costs, cuts, grouped)


def _cuts(request: BuildRequest, model: nn.Module, names: list[str], measured: Profile | None) -> list[list[int]]:
    """The ways to cut the model that are compared: for each, the first module of each stage.

    That is one way, except for "auto" with balanced cuts: one stage on each rank, and two if there are enough modules.
    """
    cuts, wanted, ranks = request.cuts, request.schedule, request.ranks
    if not isinstance(cuts, str):
        PipelineError.unless(
            isinstance(cuts, Sequence) and all(isinstance(name, str) and name in names for name in cuts),
            'cuts must be names of modules that the forward calls, or "balanced"',
            cuts,
            f"choose from {', '.join(names[:12])}",
        )
        return [[0, *(names.index(name) for name in cuts)]]
    if cuts != "balanced":
        raise PipelineError('cuts must be module names, or "balanced"', got=repr(cuts), fix='pass cuts="balanced"')
    weights = _weights(model, names, measured)
    if isinstance(wanted, Schedule):
        counts = [wanted.num_stages]
    elif wanted == "auto":
        counts = [ranks * v for v in (1, 2) if ranks * v <= len(weights)] or [ranks]
    else:
        counts = [schedules.make(wanted, ranks=ranks, microbatches=request.n_microbatches or ranks).num_stages]
    return [balance(weights, count) for count in counts]


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
        memory_limit=float(2 * ranks) if request.memory_limit is None else request.memory_limit,
        stages_per_rank=stages_per_rank,
    )


def _measure(request: BuildRequest, model: nn.Module, transport: Transport) -> Profile | None:
    """What the first rank measured, on all ranks, so that all decide alike; None if it has no sample.

    All ranks with a sample measure at the same time, as they will train: cores share caches and memory.
    """

    def measure() -> Profile | None:
        if request.sample is None:
            return None
        loss_fn = request.loss_fn if request.sample_target is not None else None
        return profile(model, request.sample, loss_fn=loss_fn, target=request.sample_target)

    found = transport.crew().share(Outcome(measure))[0].result()
    return None if found is None else replace(found, comm=transport.delay(max(found.sent_bytes)))


def partition(
    model: nn.Module, *, ranks: int, stages_per_rank: int = 1, costs: Profile | None = None
) -> list[nn.Module]:
    """Cut a model into stages of equal cost, as far as possible.

    Args:
        model: a Sequential, or a model whose forward torch.fx can trace down to its layers.
        ranks: the number of ranks.
        stages_per_rank: the number of stages on each.
        costs: what ``profile(model, sample)`` measured. Without it parameters are counted, but not embedding tables.
    """
    PipelineError.unless(isinstance(model, nn.Module), "model must be an nn.Module", model, "pass the model")
    for name, count in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
        PipelineError.unless(
            type(count) is int and count >= 1, f"{name} must be a number from 1 on", count, "pass 1 or more"
        )
    PipelineError.unless(
        costs is None or isinstance(costs, Profile), "costs must be a Profile", costs, "pass profile(model, …)"
    )
    names = called_modules(model)
    starts = balance(_weights(model, names, costs), ranks * stages_per_rank)
    return split_model(model, [names[start] for start in starts[1:]])


def _weights(model: nn.Module, names: list[str], measured: Profile | None) -> list[float]:
    """The cost of each called module: as measured, or else by its parameters."""
    if measured is None:
        return [_weight(model.get_submodule(name)) for name in names]
    return [f + i + w for f, i, w in zip(measured.F, measured.I, measured.W, strict=True)]


def _weight(module: nn.Module) -> float:
    """A rough cost of a module without running it: its parameters, except embedding tables, which are looked up."""
    tables = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
    return float(sum(p.numel() for p in module.parameters()) - tables)
