"""From what the user passes to what a rank runs: which stages there are, which of them are here, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline._partition import balance, called_modules, split_model
from sternway.pipeline._profile import Profile, profile
from sternway.pipeline._stage import LossFn
from sternway.pipeline._transport import Transport
from sternway.schedule import Costs, Schedule


@dataclass(frozen=True, slots=True)
class Built:
    """The stages of this process's ranks, and the order of work of all."""

    modules: dict[int, nn.Module]
    schedule: Schedule
    costs: Costs


def from_stages(
    stages: Mapping[int, nn.Module], wanted: Schedule | str, ranks: int, microbatches: int | None, memory: float | None
) -> Built:
    """Stages given one by one: the schedule must place just these here."""
    bad = [key for key, module in stages.items() if not isinstance(key, int) or not isinstance(module, nn.Module)]
    if bad or not stages:
        raise PipelineError(
            "stages are {stage index: module}", got=f"the entries {bad}" if bad else "none", fix="pass at least one"
        )
    plan = _named(wanted, ranks, microbatches, memory, Costs()) if isinstance(wanted, str) else wanted
    return Built(dict(stages), plan, Costs())


def from_model(
    model: nn.Module,
    cuts: Sequence[str] | str,
    wanted: Schedule | str,
    ranks: int,
    microbatches: int | None,
    memory: float | None,
    sample: Any,
    loss_fn: LossFn | None,
    target: Any,
    transport: Transport,
) -> Built:
    """A whole model: cut it, keep this process's part."""
    names = called_modules(model)
    measured = _measure(model, sample, loss_fn, target, transport)
    if isinstance(cuts, str):
        if cuts != "balanced":
            raise PipelineError('cuts are module names, or "balanced"', got=repr(cuts), fix='pass cuts="balanced"')
        weights = _weights(model, names, measured)
        options = _balanced(weights, measured, wanted, ranks, microbatches, memory)
    else:
        listed = isinstance(cuts, Sequence) and all(name in names for name in cuts if isinstance(name, str))
        PipelineError.unless(
            listed and all(isinstance(name, str) for name in cuts),
            'cuts are names of modules that the forward calls, or "balanced"',
            cuts,
            f"choose from {', '.join(names[:12])}",
        )
        starts = [0, *(names.index(name) for name in cuts)]
        options = [_planned(starts, measured, wanted, ranks, microbatches, memory)]
    starts, plan, costs = min(options, key=lambda option: option[1].simulate(option[2]).makespan)
    stages = split_model(model, [names[start] for start in starts[1:]])
    here = [stage for rank in transport.mine or range(ranks) for stage in plan.placement[rank]]
    return Built({index: stages[index] for index in here}, plan, costs)


def partition(
    model: nn.Module, *, ranks: int, stages_per_rank: int = 1, costs: Profile | None = None
) -> list[nn.Module]:
    """Cut a model into stages of even cost.

    Args:
        model: Sequential-like, or with a list of layers; see ``Pipeline``.
        ranks: for how many ranks.
        stages_per_rank: how many stages each is to hold.
        costs: what ``profile(model, sample)`` measured; without it, parameters are counted, embedding tables as free.
    """
    PipelineError.unless(isinstance(model, nn.Module), "a module is cut", model, "pass the model")
    for name, count in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
        PipelineError.unless(
            type(count) is int and count >= 1, f"{name} is a number from 1 on", count, "pass 1 or more"
        )
    PipelineError.unless(
        costs is None or isinstance(costs, Profile), "costs are a Profile", costs, "pass profile(model, …)"
    )
    names = called_modules(model)
    weights = _weights(model, names, costs)
    starts = balance(weights, ranks * stages_per_rank)
    return split_model(model, [names[start] for start in starts[1:]])


def _weights(model: nn.Module, names: list[str], measured: Profile | None) -> list[float]:
    """What each called module costs: as measured, or else by its parameters."""
    if measured is None:
        return [_weight(model.get_submodule(name)) for name in names]
    return [f + i + w for f, i, w in zip(measured.F, measured.I, measured.W, strict=True)]


def _weight(module: nn.Module) -> float:
    """Roughly what a module costs, without running it: its parameters, but for tables that are looked up."""
    tables = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
    return float(sum(p.numel() for p in module.parameters()) - tables)


Option = tuple[list[int], Schedule, Costs]


def _balanced(
    weights: list[float],
    measured: Profile | None,
    wanted: Schedule | str,
    ranks: int,
    microbatches: int | None,
    memory: float | None,
) -> list[Option]:
    """The even cut; for "auto", with one stage a rank and with two, if the model has so many pieces."""
    if isinstance(wanted, Schedule):
        counts = [wanted.num_stages]
    elif wanted == "auto":
        counts = [ranks * v for v in (1, 2) if ranks * v <= len(weights)] or [ranks]
    else:
        counts = [schedules.make(wanted, ranks=ranks, microbatches=microbatches or ranks).num_stages]
    return [_planned(balance(weights, count), measured, wanted, ranks, microbatches, memory) for count in counts]


def _planned(
    starts: list[int],
    measured: Profile | None,
    wanted: Schedule | str,
    ranks: int,
    microbatches: int | None,
    memory: float | None,
) -> Option:
    costs = measured.grouped(starts).costs if measured is not None else Costs()
    if isinstance(wanted, str):
        wanted = _named(wanted, ranks, microbatches, memory, costs, stages_per_rank=max(1, len(starts) // ranks))
    if wanted.num_stages != len(starts):
        raise PipelineError(
            f"the schedule {wanted.name} has {wanted.num_stages} stages, and so has the model",
            got=f"{len(starts)} stages, from {len(starts) - 1} cuts",
            fix=f'pass {wanted.num_stages - 1} cuts, or cuts="balanced"',
        )
    return starts, wanted, costs


def _named(
    name: str,
    ranks: int,
    microbatches: int | None,
    memory: float | None,
    costs: Costs,
    stages_per_rank: int = 1,
) -> Schedule:
    """A schedule by name, or for "auto" the best that a search finds."""
    if microbatches is None:
        raise PipelineError(
            "a schedule by name needs the number of microbatches", got=repr(name), fix="pass n_microbatches="
        )
    if name != "auto":
        return schedules.make(name, ranks=ranks, microbatches=microbatches)
    return schedules.search(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=float(2 * ranks) if memory is None else memory,
        stages_per_rank=stages_per_rank,
    )


def _measure(
    model: nn.Module, sample: Any, loss_fn: LossFn | None, target: Any, transport: Transport
) -> Profile | None:
    """What the first rank measured, for all ranks, so that all decide alike; None if it was given no sample.

    All that have a sample measure at once, as they will work at once: cores share caches and memory.
    """
    found, problem = None, None
    if sample is not None:
        try:
            found = profile(model, sample, loss_fn=loss_fn if target is not None else None, target=target)
        except PipelineError as error:
            problem = error.rule, error.got, error.fix
    found, problem = transport.crew().share((found, problem))[0]
    if problem is not None:
        rule, got, fix = problem
        raise PipelineError(rule, got=got, fix=fix)
    return None if found is None else replace(found, comm=transport.delay(max(found.sent_bytes)))
