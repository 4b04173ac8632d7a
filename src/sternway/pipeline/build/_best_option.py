"""The best schedule for one way to cut a whole model: searched, named or given; within the bytes, if limited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sternway import schedule as schedules
from sternway.errors import PipelineError
from sternway.pipeline.build._request import BuildRequest
from sternway.pipeline.build._room import Limit, Recompute, Room, cost_of
from sternway.schedule import Costs, Schedule


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to cut the model, with the schedule for it."""

    starts: list[int]
    schedule: Schedule
    costs: Costs
    limit: Limit
    room: Room | None = None
    sharded: bool = False
    gathered: int | None = None

    def cost(self) -> tuple[float, float]:
        """The time of a step among others, and that of one alone; with the upkeep of sharded stages."""
        plan = schedules.sharded(self.schedule, gathered=self.gathered) if self.sharded else self.schedule
        return cost_of(plan, self.costs)


def best_option(
    request: BuildRequest, starts: list[int], costs: Costs, room: Room | None, per_rank: int, looped: bool
) -> PlanOption:
    """One way to cut, with the best schedule for it; for "auto", with the best number of sharded stages gathered."""
    counted = _gathered_rooms(room, per_rank) if request.schedule == "auto" else [room]
    return min((_option(request, starts, costs, each, per_rank, looped) for each in counted), key=_merit)


def _merit(option: PlanOption) -> tuple[bool, tuple[float, float]]:
    """What is best of one way to cut: that it fits, then that it is fast."""
    return option.room is not None and not option.room.fits(option.schedule), option.cost()


def _gathered_rooms(room: Room | None, per_rank: int) -> list[Room | None]:
    """The same room with all stages of a rank gathered, and with ever fewer; whatever the user wants, if anything."""
    if room is None or room.shards is None or room.shards.gathered is not None:
        return [room]
    return [replace(room, shards=replace(room.shards, gathered=count)) for count in range(per_rank, 0, -1)]


def _option(
    request: BuildRequest, starts: list[int], costs: Costs, room: Room | None, per_rank: int, looped: bool
) -> PlanOption:
    unknown = costs == Costs()
    if room is not None:
        costs = room.costs(costs, request.ranks)
        if unknown:  # a link that is no faster than the ranks, in the units of these times
            costs = replace(costs, offload=3.0)
    gathered = request.gathered if room is None or room.shards is None else room.shards.gathered
    limit: Limit = limit_of(request, costs)
    if room is not None and request.schedule == "auto":

        def find(limit: Limit, recompute: Recompute) -> Schedule:
            return schedule_of(request, costs, limit, recompute, per_rank, looped, gathered)

        plan, limit = room.best(find, limit_of(request, costs), costs)
    else:
        plan = schedule_of(request, costs, limit, (), per_rank, looped, gathered)
        plan = plan if room is None or plan.num_stages != len(starts) else room.lightest(plan, costs)
    if plan.num_stages != len(starts):
        raise PipelineError(
            f"schedule {plan.name} needs {plan.num_stages} stages",
            got=f"{len(starts)} from cuts={request.cuts!r}",
            fix=f'pass {plan.num_stages - 1} cuts, or cuts="balanced"',
        )
    return PlanOption(starts, plan, costs, limit, room, request.shard is not None and not plan.gathered, gathered)


def schedule_of(
    request: BuildRequest,
    costs: Costs,
    limit: Limit,
    recompute: Recompute = (),
    stages_per_rank: int = 1,
    looped: bool = False,
    gathered: int | None = None,
) -> Schedule:
    """The schedule that was passed, or made by its name; for "auto" the best that a search finds.

    Sharded stages are priced with their upkeep, which is not in the result: it is placed when they are sharded.
    """
    wanted, ranks, microbatches = request.schedule, request.ranks, request.n_microbatches
    if isinstance(wanted, Schedule):
        return wanted
    if microbatches is None:
        raise PipelineError(
            "a schedule given by name needs n_microbatches", got=repr(wanted), fix="pass n_microbatches="
        )
    if wanted != "auto":
        return schedules.make(wanted, ranks=ranks, microbatches=microbatches)
    sharded = request.shard is not None
    found = schedules.search(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=limit,
        stages_per_rank=stages_per_rank,
        looped=looped,
        recompute=recompute,
        sharded=sharded,
        gathered=gathered if sharded else None,
    )
    return schedules.sharded(found, stages=()) if sharded else found


def limit_of(request: BuildRequest, costs: Costs) -> float:
    """What a rank may keep under "auto", in forwards of one microbatch."""
    if request.memory_limit is not None:
        return request.memory_limit
    after_f, after_i = (
        sum(each) if isinstance(each, Sequence) else each for each in (costs.memory_after_F, costs.memory_after_I)
    )
    return 2 * request.ranks * (max(1.0, after_i / after_f) if after_f else 1.0)
