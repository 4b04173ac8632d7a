"""The ways to cut a whole model, and which of them is the best, with the schedule for it (``_best_option.py``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sternway import schedule as schedules
from sternway.errors import PipelineError, ScheduleError
from sternway.pipeline.build._best_option import PlanOption, best_option
from sternway.pipeline.build._blocks import recomputing
from sternway.pipeline.build._copied import copied
from sternway.pipeline.build._measure import agreed_costs, measure
from sternway.pipeline.build._offload import agreed_rate, moves
from sternway.pipeline.build._partition import Layout, lay_out, weights
from sternway.pipeline.build._profile import Profile
from sternway.pipeline.build._rehearse import Rehearsal
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.build._room import Room, no_room, rooms
from sternway.pipeline.build._shard_stage import shard_stages_of
from sternway.pipeline.build._weights import on_zeros
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.transport._crew import Outcome
from sternway.pipeline.transport._transport import Transport
from sternway.schedule import Costs, Schedule

T = TypeVar("T")

_REHEARSED = 4  # ways to cut that are tried at most, the best by simulation first
_CLOSE = 0.1  # to the fastest, by this part of its time: tried once more


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known about a whole model before its plan is chosen. It is the same on all ranks."""

    layout: Layout
    measured: Profile | None
    options: list[PlanOption]


def draft_plans(request: BuildRequest, transport: Transport) -> Draft | None:
    """The ways to cut a whole model, each with its schedule; None if stages were passed one by one."""
    _check_same(request, transport)
    if not isinstance(request.stages, nn.Module):
        return None
    model, counts, named = request.stages, _stage_counts(request), _named_cuts(request)
    layout = _agreed_layout(request, model, min(counts), named, transport)
    measured = None if request.weights is not None else measure(request, model, layout, transport)
    if named is not None:
        ways = [layout.starts(named)]
    else:
        costs = weights(model, layout) if measured is None else measured.totals
        if measured is None:  # nobody knows what messages cost, and two stages on each rank send twice as many
            counts = counts[:1]
        counts = [count for count in counts if count <= len(layout.names)] or counts[:1]
        ways = [layout.balanced(costs, count) for count in counts]
        if request.memory is not None:  # stages of equal size may fit where those that take equally long do not
            even = (layout.balanced(weights(model, layout), count) for count in counts)
            ways += [way for way in even if way not in ways]
    costs_of = agreed_costs(request, model, layout, ways, measured, transport)
    if request.memory is None:
        return Draft(layout, measured, _agreed_options(request, ways, costs_of, [None] * len(ways), transport))
    found = _agreed_rooms(request, model, layout, ways, costs_of, transport)
    options = _agreed_options(request, ways, costs_of, found, transport)
    fitting = [option for option in options if option.room is not None and option.room.fits(option.schedule)]
    if not fitting:
        smallest = min(options, key=lambda option: option.room.peak(option.schedule) if option.room else 0)
        assert smallest.room is not None
        raise no_room(smallest.room, smallest.schedule, smallest.costs)
    return Draft(layout, measured, fitting)


def _check_same(request: BuildRequest, transport: Transport) -> None:
    """Raise on all ranks if their arguments ask for different plans."""
    wanted = request.schedule if isinstance(request.schedule, str) else "a Schedule"
    asked = {
        "stages": "a whole model" if isinstance(request.stages, nn.Module) else "one by one",
        "schedule": wanted,
        "cuts": repr(request.cuts),
        "n_microbatches": request.n_microbatches,
        "memory_limit": request.memory_limit,
        "memory": request.memory,
        "offload": request.offload is not None,
        "offload_rate": request.offload_rate,
    }
    for rank, theirs in enumerate(rows := transport.crew().share(asked)):
        for name, value in theirs.items():
            if value != rows[0][name]:
                raise PipelineError(
                    "all ranks must ask for the same plan",
                    got=f"{name}={value!r} on rank {rank}, and {rows[0][name]!r} on rank 0",
                    fix="build the pipeline from the same arguments on every rank",
                )


def choose(request: BuildRequest, draft: Draft, transport: Transport) -> PlanOption:
    """The best way to cut the model: by simulation, or in steps with the sample if there are processes to run them.

    Copies of a pipeline take what the first one finds. If a step fails, the transport is closed on all ranks. Stages
    that will be sharded are sharded in these steps, too, if there is room for a copy of the model: in FSDP's dtype
    they may take a fraction of the time, and messages do not.
    """
    if draft.measured is None or not transport.mine or len(draft.options) == 1 or moves(request.schedule):
        return min(draft.options, key=lambda option: option.cost())
    whole = request.stages
    assert isinstance(whole, nn.Module)
    rehearsal = Rehearsal(
        transport, request.sample, request.sample_target, request.loss_fn, request.everyone, request.offload
    )
    shard = request.shard if _can_copy(request, transport) else None
    crew = None if request.everyone is None else transport.crew_apart(request.everyone)

    def seconds(option: PlanOption) -> float:
        model = whole if shard is None else copied(whole)
        with recomputing(model, draft.layout, option.starts, option.schedule.shares):
            cut = draft.layout.cut(model, option.starts)
            parts = {index: ModelPart(cut, index) for index in stages_here(request, transport, option.schedule)}
            if shard is not None:
                cut.release(set(parts))
                shard_stages_of(model, list(parts.values()), shard)
            plan = option.schedule, option.costs, option.limit, option.room, option.gathered
            found = rehearsal.span(parts, *plan)
        return found if crew is None else crew.share(found)[0]

    return _fastest(sorted(draft.options, key=lambda option: option.cost())[:_REHEARSED], seconds)


def _fastest(options: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The option that takes least. Close ones are tried twice: other work may have held up one of them."""
    spans = [seconds(option) for option in options]
    close = [place for place, span in enumerate(spans) if span <= (1 + _CLOSE) * min(spans)]
    for place in close if len(close) > 1 else ():
        spans[place] = min(spans[place], seconds(options[place]))
    return options[spans.index(min(spans))]


def _can_copy(request: BuildRequest, transport: Transport) -> bool:
    """Whether all processes have room for a copy of the model. One with DTensors is not copied."""
    assert isinstance(request.stages, nn.Module)
    parameters = list(request.stages.parameters())
    plain = not any(isinstance(parameter, DTensor) for parameter in parameters)
    size, device = sum(parameter.nbytes for parameter in parameters), transport.device
    room = device.type != "cuda" or torch.cuda.mem_get_info(device)[0] > 2 * size
    crew = transport.crew() if request.everyone is None else transport.crew_apart(request.everyone)
    return all(crew.share(plain and room))


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


def stages_here(request: BuildRequest, transport: Transport, schedule: Schedule) -> list[int]:
    """The stages of this process's ranks."""
    return [stage for rank in transport.mine or range(request.ranks) for stage in schedule.placement[rank]]


def _agreed_options(
    request: BuildRequest,
    ways: list[list[int]],
    costs_of: Sequence[Costs],
    found: Sequence[Room | None],
    transport: Transport,
) -> list[PlanOption]:
    """For each way to cut, its schedule. For "auto" the first rank alone searches, which can take seconds."""

    def find() -> list[PlanOption]:
        options, refused = list[PlanOption](), list[ScheduleError]()
        for starts, costs, room in zip(ways, costs_of, found, strict=True):
            per_rank = max(1, len(starts) // request.ranks)
            for looped in (False, True) if _may_loop(request, per_rank) else (False,):
                try:
                    options.append(best_option(request, starts, costs, room, per_rank, looped))
                except ScheduleError as error:  # it needs more memory than there is
                    refused.append(error)
        if not options:
            raise refused[0]
        return options

    if request.schedule != "auto" or not transport.mine:
        return find()
    return transport.crew().from_first(find)


def _may_loop(request: BuildRequest, per_rank: int) -> bool:
    """Whether to look at two looped stages of each rank, too: within ample memory a V is as fast, or faster."""
    limited = request.memory is not None or request.memory_limit is not None
    return request.schedule == "auto" and request.ranks > 1 and per_rank == 2 and limited


def _agreed_rooms(
    request: BuildRequest,
    model: nn.Module,
    layout: Layout,
    ways: list[list[int]],
    costs_of: Sequence[Costs],
    transport: Transport,
) -> list[Room]:
    """What the first rank counts, on all ranks, so that all decide alike."""
    assert request.memory is not None
    limit, rate = request.memory, agreed_rate(request, transport)

    def count() -> list[Room]:
        if request.sample is None:
            raise PipelineError("memory needs a sample, on the first rank", got="none", fix="pass sample=")
        sample, target, loss_fn, shards = request.sample, request.sample_target, request.loss_fn, request.shards
        gpus = transport.device.type != "cpu"
        asked = request.schedule.shares if isinstance(request.schedule, Schedule) else {}
        return rooms(model, layout, ways, limit, sample, target, loss_fn, shards, rate, asked, costs_of, gpus)

    if not transport.mine:
        return count()
    found: Outcome[list[Room]] = Outcome(count) if transport.mine == (0,) else Outcome.of([])
    return transport.crew().share(found)[0].result()
