"""Where a stage's sharded parameters are gathered and freed, and its gradients reduced: a pass over any schedule.

Gathering and reducing run beside the computation, on a link of each rank that carries one at a time. So they are placed
where they can begin first:

    UNSHARD      as soon as there is room for one more gathered stage, in the order in which stages are used next
    REDUCE_GRAD  right after the stage's last W or B: other stages of the rank still compute
    RESHARD      after that; before, only where the room is needed for a stage that is used sooner

With room for all of a rank's stages, each is gathered once in a step.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from sternway.errors import ScheduleError
from sternway.schedule._action import MOVES, Step, Upkeep
from sternway.schedule._schedule import Schedule


def sharded(
    schedule: Schedule, *, stages: Collection[int] | None = None, gathered: int | Sequence[int] | None = None
) -> Schedule:
    """Return the schedule with UNSHARD, RESHARD and REDUCE_GRAD of its sharded stages.

    Example:
        >>> from sternway import schedule
        >>> print(schedule.sharded(schedule.make("zb-h1", ranks=1, microbatches=1)))
        zb-h1: 1 rank, 1 microbatch, 1 stage
        rank 0: 0UNSHARD 0F0 0I0 0W0 0REDUCE_GRAD 0RESHARD

    Args:
        schedule: the schedule; what upkeep it has is replaced.
        stages: the stages that are sharded; all by default.
        gathered: how many stages a rank keeps gathered at once; all by default. One number, or one for each rank. A
            step that runs two stages at once has both. With fewer, a stage is gathered again each time that its turn
            comes.

    Raises:
        ScheduleError: ``gathered`` is no number from 1 on, nor one for each rank.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "sharded needs a Schedule", schedule, "make or read one")
    held = set(range(schedule.num_stages)) if stages is None else set(stages)
    most = max(1, len(held)) if gathered is None else gathered
    rooms = list(most) if isinstance(most, Sequence) else [most] * schedule.ranks
    ScheduleError.unless(
        len(rooms) == schedule.ranks and all(type(room) is int and room >= 1 for room in rooms),
        "gathered must be a number of stages from 1 on, or one for each rank",
        gathered,
        "pass 1 or more, or leave it out",
    )
    rows = (sharded_row(steps, held, room) for steps, room in zip(schedule.actions, rooms, strict=True))
    return replace(schedule, actions=tuple(rows))


def sharded_row(steps: Sequence[Step], held: Collection[int], room: int) -> tuple[Step, ...]:
    """Return the steps of a rank with the upkeep of these stages, of which there is room for so many at once."""
    return tuple(_with_upkeep(without_shards(steps), set(held), room))


def without_shards(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without what sharded stages need."""
    return [step for step in steps if not _is_of_shards(step)]


def _is_of_shards(step: Step) -> bool:
    return isinstance(step, Upkeep) and step.op not in MOVES


def computed(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without upkeep."""
    return [step for step in steps if not isinstance(step, Upkeep)]


def _with_upkeep(steps: Sequence[Step], held: set[int], room: int) -> Iterator[Step]:
    now: list[int] = []  # gathered, the oldest first
    last = {action.stage: index for index, step in enumerate(steps) for action in step.actions}
    for index, (step, upcoming) in enumerate(zip(steps, _upcoming(steps, held), strict=True)):
        mine = {action.stage for action in step.actions}
        wanted = upcoming[: max(room, len(mine & held))]
        for stage in [stage for stage in now if stage not in wanted]:
            now.remove(stage)
            yield Upkeep(stage, "RESHARD")
        for stage in [stage for stage in wanted if stage not in now]:
            now.append(stage)
            yield Upkeep(stage, "UNSHARD")
        yield step
        for stage in [stage for stage in now if last[stage] == index]:
            now.remove(stage)
            yield Upkeep(stage, "REDUCE_GRAD")
            yield Upkeep(stage, "RESHARD")


def _upcoming(steps: Sequence[Step], held: set[int]) -> list[list[int]]:
    """For each step, the sharded stages that are used from then on, the next one first."""
    found: list[list[int]] = []
    following: list[int] = []
    for step in reversed(steps):
        own = list(dict.fromkeys(action.stage for action in step.actions if action.stage in held))
        following = own + [stage for stage in following if stage not in own]
        found.append(following)
    return found[::-1]


def check_upkeep(schedule: Schedule) -> None:
    """Check that a stage with upkeep is gathered whenever it computes, reduced once at its end, and freed then.

    Raises:
        ScheduleError: it is not, with rank and step.
    """
    kept = {
        step.stage for steps in schedule.actions for step in steps if isinstance(step, Upkeep) and _is_of_shards(step)
    }
    if not kept:
        return
    holder = schedule.stage_ranks()
    for rank, steps in enumerate(schedule.actions):
        last = {action.stage: index for index, step in enumerate(steps) for action in step.actions}
        now: set[int] = set()
        reduced: set[int] = set()
        for index, step in enumerate(steps):
            fault = None
            if not isinstance(step, Upkeep) or step.op in MOVES:
                fault = _needs_gathering(step, kept - now)
            elif step.stage >= len(holder) or holder[step.stage] != rank:
                fault = "of a stage that the rank does not hold", "move it to the rank of its stage"
            elif step.op == "UNSHARD":
                fault = ("of a stage that is gathered", "remove it") if step.stage in now else None
                now.add(step.stage)
            elif step.stage not in now:
                fault = "of a stage that is not gathered", f"add {step.stage}UNSHARD before it"
            elif step.op == "RESHARD":
                now.remove(step.stage)
            else:
                fault = _reduces_early(step.stage, index, last, reduced)
                reduced.add(step.stage)
            if fault is not None:
                raise ScheduleError(
                    "a sharded stage must be gathered when it computes, and reduced once, after its last backward",
                    got=f"{step} (rank {rank}, step {index}) {fault[0]}",
                    fix=f"{fault[1]}; schedule.sharded() places all of them",
                )
        for what, stages in (("RESHARD", now), ("REDUCE_GRAD", kept & set(schedule.placement[rank]) - reduced)):
            if stages:
                raise ScheduleError(
                    "a sharded stage must be reduced and freed by the end of a step",
                    got=f"no {min(stages)}{what} (rank {rank}, {len(steps)} steps)",
                    fix=f"add {min(stages)}{what}; schedule.sharded() places all of them",
                )


def _needs_gathering(step: Step, freed: set[int]) -> tuple[str, str] | None:
    lacking = [action.stage for action in step.actions if action.stage in freed]
    return ("of a stage that is not gathered", f"add {lacking[0]}UNSHARD before it") if lacking else None


def _reduces_early(stage: int, index: int, last: dict[int, int], reduced: set[int]) -> tuple[str, str] | None:
    if stage in reduced:
        return "again", "remove it"
    if last.get(stage, -1) > index:
        return f"before step {last[stage]} of the stage", "move it behind that"
    return None
