"""When does every action run? An exact simulation, in time proportional to the number of actions.

Each rank runs its actions in order, each as soon as the rank is free and what it waits for has arrived (``_depends``).
An overlapped pair waits for what both of its actions need, takes the time of both, and ends both at once. Sends do not
block. So any order in which the actions can run gives the same times, and one pass over such an order finds them.
"""

from sternway.errors import ScheduleError
from sternway.schedule._costs import Costs, StageCosts
from sternway.schedule._depends import needs, run_order, step_number
from sternway.schedule._schedule import Schedule
from sternway.schedule._timeline import Bottleneck, Event, Timeline, timeline_of


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:  # noqa: B008 - frozen, so safely shared
    """Time every action of a schedule.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("gpipe", ranks=2, microbatches=2)
        >>> [(str(e.action), e.start, e.end) for e in simulate(s).events[1]]
        [('1F0', 1.0, 2.0), ('1F1', 2.0, 3.0), ('1B0', 3.0, 5.0), ('1B1', 5.0, 7.0)]

    Args:
        schedule: a schedule that passes ``check``.
        costs: times and memory of one microbatch through one rank's share; see ``Costs``.

    Raises:
        ScheduleError: the schedule cannot run to its end, or the costs are for another number of stages.
    """
    ScheduleError.unless(
        isinstance(schedule, Schedule), "simulate needs a Schedule", schedule, 'pass schedule.make("1f1b", ...)'
    )
    ScheduleError.unless(isinstance(costs, Costs), "costs must be a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    per_stage = costs.per_stage(schedule.placement)
    order, reached = run_order(schedule)
    for rank, (steps, count) in enumerate(zip(schedule.actions, reached, strict=True)):
        if count < len(steps):
            raise ScheduleError(
                "an action waits forever for its inputs",
                got=f"{steps[count]} (rank {rank}, step {count})",
                fix="call check(), which says why",
            )
    events, causes = _run(schedule, per_stage, order)
    path = _critical_path(events, causes)
    return timeline_of(schedule, costs, events, path, _bottlenecks(path, per_stage))


def _run(
    schedule: Schedule, costs: StageCosts, order: list[tuple[int, int]]
) -> tuple[list[list[Event]], list[list[Event | None]]]:
    """Return each rank's events, and for each of them the event that it waited for last, if any."""
    m, sources = schedule.n_microbatches, needs(schedule.num_stages)
    comm, cost = costs.comm, costs.of
    makers: dict[int, Event] = {}  # by step * m + microbatch
    events: list[list[Event]] = [[] for _ in schedule.actions]
    causes: list[list[Event | None]] = [[] for _ in schedule.actions]
    for rank, index in order:
        mine, step = events[rank], schedule.actions[rank][index]
        cause = mine[-1] if mine else None
        start, length, keys = cause.end if cause else 0.0, 0.0, []
        for action in step.actions:
            number, i = step_number(action), action.microbatch
            for source in sources[number]:
                maker = makers[source * m + i]
                arrival = maker.end if maker.rank == rank else maker.end + comm
                if arrival > start:
                    start, cause = arrival, maker
            length += cost(action.op, action.stage)
            keys.append(number * m + i)
        event = Event(rank, index, step, start, start + length)
        mine.append(event)
        causes[rank].append(cause)
        for key in keys:
            makers[key] = event
    return events, causes


def _critical_path(events: list[list[Event]], causes: list[list[Event | None]]) -> tuple[Event, ...]:
    """Walk back from the last end: at each event, to the one that it waited for."""
    event = max((rank[-1] for rank in events if rank), key=lambda event: event.end, default=None)
    path = []
    while event is not None:
        path.append(event)
        event = causes[event.rank][event.step]
    return tuple(reversed(path))


def _bottlenecks(path: tuple[Event, ...], costs: StageCosts) -> tuple[Bottleneck, ...]:
    """Sum the times on the critical path by kind of work."""
    times: dict[str, float] = {}
    clock = 0.0
    for event in path:
        if event.start > clock:
            times["comm"] = times.get("comm", 0.0) + event.start - clock
        clock = event.end
        for action in event.action.actions:
            what = f"{action.op} of stage {action.stage}"
            times[what] = times.get(what, 0.0) + costs.of(action.op, action.stage)
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Bottleneck(what, time, time / clock) for what, time in ordered if time > 0)
