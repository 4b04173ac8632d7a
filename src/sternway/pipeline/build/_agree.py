"""From a plan to what a pipeline holds: a plan that all ranks agree on, its stages, and its description."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from sternway._bytes import show_bytes
from sternway.errors import PipelineError
from sternway.pipeline.build._checks import check_placement
from sternway.pipeline.build._options import Draft, choose, draft_plans
from sternway.pipeline.build._plan import BuildPlan, make_plan
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.step._finder import Finder
from sternway.pipeline.step._result import first_timeline
from sternway.pipeline.step._scaler import GradScaler
from sternway.pipeline.step._slices import Slices
from sternway.pipeline.step._stage import LossFn, Stage
from sternway.pipeline.step._tuner import Tuner
from sternway.pipeline.transport._collective import Collective
from sternway.pipeline.transport._facts import checksum
from sternway.pipeline.transport._transport import Transport
from sternway.saved import Offload
from sternway.schedule import Costs, Schedule
from sternway.schedule.formats import show_recompute


def agreed_plan(request: BuildRequest, transport: Transport) -> BuildPlan:
    """The plan for this process, if all ranks have one, with the same schedule."""
    drafts: list[Draft | None] = []
    transport.crew().agree(lambda: drafts.append(draft_plans(request, transport)))
    best = None if drafts[0] is None else choose(request, drafts[0], transport)
    made: list[BuildPlan] = []

    def prepare() -> int:
        made.append(make_plan(request, transport, drafts[0], best))
        check_placement(made[0], request, transport)
        return checksum(made[0].schedule.to_json())

    found, schedule = transport.crew().agree(prepare), made[0].schedule
    if request.everyone is not None:  # what is sharded over several pipelines computes together, in one order
        found = transport.crew_apart(request.everyone).share(checksum(schedule.to_json()))
    other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise PipelineError(
            "all ranks must run the same schedule",
            got=f"another on rank {other} than on rank 0; here it is {schedule.name} of {schedule.n_microbatches}",
            fix="build the pipeline from the same arguments on every rank",
        )
    return made[0]


def make_stages(
    plan: BuildPlan,
    loss_fn: LossFn | None,
    saved: AbstractContextManager[Any] | Callable[[int], AbstractContextManager[Any]] | None,
    scaler: GradScaler | None,
    cuda_graphs: bool = False,
    offload: Callable[[], Offload] | None = None,
    slices: Slices | None = None,
    copies: Collective | None = None,
) -> dict[int, Stage]:
    """The stages of a plan that are here."""
    last = plan.schedule.num_stages - 1
    return {
        index: Stage(
            index,
            module,
            is_last=index == last,
            loss_fn=loss_fn if index == last else None,
            saved=saved if saved is None or isinstance(saved, AbstractContextManager) else saved(index),
            scale=None if scaler is None else scaler.scale,
            cuda_graphs=cuda_graphs,
            recompute=plan.cut is None and index in plan.schedule.shares,
            offload=offload,
            slices=slices,
            copies=copies,
        )
        for index, module in sorted(plan.modules.items())
    }


def make_tuner(
    plan: BuildPlan, request: BuildRequest, transport: Transport, first: Schedule, gathered: int | None
) -> Tuner | None:
    """What changes the plan of "auto" between steps; None if there is nothing to change, or no time to measure.

    In one process ranks run in turn: there the order makes no difference.

    Args:
        plan: the plan, without the upkeep of sharded stages.
        request: the arguments of the pipeline.
        transport: its transport.
        first: the plan's schedule, with upkeep.
        gathered: how many sharded stages a rank keeps gathered.
    """
    if request.schedule != "auto" or not transport.mine or request.ranks == 1:
        return None
    everyone, costs = request.everyone, plan.costs
    is_first = transport.mine[0] == 0 if everyone is None else dist.get_rank() == everyone[0]
    return Tuner(
        first,
        plan.costs,
        plan.limit,
        None if plan.room is None else plan.room.fits,
        gathered,
        Finder(is_first, lambda said: transport.hear_later(said, everyone)),
        None if everyone is None else lambda own: first_timeline(own, transport, everyone, costs),
    )


def describe(plan: BuildPlan, transport: Transport, nbytes: int) -> str:
    """What ``print`` shows of a pipeline whose parameters take so many bytes here."""
    schedule, mine, size = plan.schedule, transport.mine, show_bytes(nbytes)
    here = f"rank {mine[0]}, stages {', '.join(map(str, sorted(plan.modules)))}" if mine else "all ranks"
    lines = [f"Pipeline of {schedule.num_stages} stages on {schedule.ranks} ranks"]
    lines.append(f"  schedule  {schedule.name}, {schedule.n_microbatches} microbatches")
    if plan.cuts is not None:
        lines.append(f"  cuts      {', '.join(plan.cuts) or 'none'}")
        crosses = None if plan.cut is None else plan.cut.crosses()
        for cut, values in zip(plan.cuts, crosses or (), strict=False):
            lines.append(f"  crosses   to {cut}: {', '.join(values)}")
    lines.append(f"  here      {here}: {size} of parameters")
    timeline, peaks = schedule.simulate(plan.costs), plan.peak_bytes()
    if plan.costs == Costs():
        lines.append(f"  planned   bubble {timeline.bubble_rate:.1%}, if F, I and W take equally long")
    else:
        memory = (
            ""
            if peaks is None or plan.room is not None
            else f", activations of at most {show_bytes(max(peaks))} on a rank"
        )
        lines.append(f"  planned   {1e3 * timeline.makespan:.2f} ms, bubble {timeline.bubble_rate:.1%}{memory}")
    if plan.room is not None:
        again = f", blocks of stages {show_recompute(schedule.recompute)} computed again" if schedule.recompute else ""
        counts = {rank: len(schedule.moved(rank)) for rank in range(schedule.ranks)}
        away = ", ".join(f"{count} on rank {rank}" for rank, count in counts.items() if count)
        again += f", microbatches offloaded: {away}" if away else ""
        peak = show_bytes(plan.room.peak(schedule))
        lines.append(f"  memory    at most {peak} of {show_bytes(plan.room.limit)} on a rank, with AdamW{again}")
    return "\n".join(lines)
