"""When does every action run? An exact simulation, in time proportional to the number of actions.

Each rank runs its actions in order, each as soon as the rank is free and what it waits for has arrived (``_depends``).
An overlapped pair waits for what both of its actions need, takes their time together (``Costs.overlap``), and ends both
at once. Sends do not block, though messages from one rank to another follow each other (``_wires``), and neither does
the upkeep of sharded stages: each rank has a link that gathers or reduces one stage at a time, and only what computes
on a stage waits for its gathering. Two more links move microbatches to the host and back; what computes after an
OFFLOAD waits for it, and a backward for its RELOAD. So any order in which the actions can run gives the same times, and
one pass over such an order finds them.
"""

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Upkeep
from sternway.schedule._costs import Costs
from sternway.schedule._depends import run
from sternway.schedule._schedule import Schedule
from sternway.schedule._stage_costs import StageCosts
from sternway.schedule._timeline import Bottleneck, Event, Timeline, timeline_of
from sternway.schedule._wires import Wires

LINKS = {"UNSHARD": "net", "RESHARD": "net", "REDUCE_GRAD": "net", "OFFLOAD": "out", "RELOAD": "back"}
"""The link that carries each kind of upkeep, one at a time."""


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
    per_stage = costs.per_stage(schedule.placement, schedule.recompute, schedule.copies)
    events, causes = _run(schedule, per_stage)
    for rank, (steps, timed) in enumerate(zip(schedule.actions, events, strict=True)):
        if len(timed) < len(steps):
            raise ScheduleError(
                "an action waits forever for its inputs",
                got=f"{steps[len(timed)]} (rank {rank}, step {len(timed)})",
                fix="call check(), which says why",
            )
    path = _critical_path(events, causes)
    return timeline_of(schedule, costs, events, path, _bottlenecks(path, per_stage))


def _run(schedule: Schedule, costs: StageCosts) -> tuple[list[list[Event]], list[list[Event | None]]]:
    """Return each rank's events, and for each of them the event that it waited for last, if any."""
    wires = Wires(schedule, costs)
    nothing = Event(0, 0, Action(0, "F", 0), 0.0, 0.0)
    makers = [nothing] * (3 * schedule.num_stages * schedule.n_microbatches)
    events: list[list[Event]] = [[] for _ in schedule.actions]
    causes: list[list[Event | None]] = [[] for _ in schedule.actions]
    free: list[Event | None] = [None] * schedule.ranks  # what each rank ran last
    links: dict[tuple[int, str], Event] = {}  # what each link of a rank carried last
    gathered: dict[int, Event] = {}
    back: dict[tuple[int, int], Event] = {}  # what was reloaded
    for rank, inputs, outputs in run(schedule):
        mine = events[rank]
        step = schedule.actions[rank][len(mine)]
        cause = free[rank]
        start = cause.end if cause else 0.0
        if isinstance(step, Upkeep):
            if step.op == "OFFLOAD":  # it has been on its way since the end of F
                cause = makers[3 * step.stage * schedule.n_microbatches + (step.microbatch or 0)]
                if cause is nothing:
                    raise ScheduleError(
                        "what is offloaded must have been computed before",
                        got=f"{step} (rank {rank}, step {len(mine)})",
                        fix="call check(), which says why",
                    )
                start = cause.end
            before = links.get((rank, LINKS[step.op]))
            if step.op != "RESHARD" and before is not None and before.end > start:
                start, cause = before.end, before
            event = Event(rank, len(mine), step, start, start + upkeep_time(step, costs))
            mine.append(event)
            causes[rank].append(cause)
            if step.op != "RESHARD":
                links[rank, LINKS[step.op]] = event
            if step.op == "UNSHARD":
                gathered[step.stage] = event
            elif step.op == "RELOAD":
                back[step.stage, step.microbatch or 0] = event
            elif step.op == "OFFLOAD" and event.end > (waiting.end if (waiting := free[rank]) else 0.0):
                free[rank] = event
            continue
        for key in inputs:
            maker = makers[key]
            arrival = maker.end if maker.rank == rank else wires.arrived[key]
            if arrival > start:
                start, cause = arrival, maker
        for action in step.actions:
            for ready in (gathered.get(action.stage), back.get((action.stage, action.microbatch))):
                if ready is not None and ready.end > start:
                    start, cause = ready.end, ready
        event = Event(rank, len(mine), step, start, start + costs.time(step))
        mine.append(event)
        causes[rank].append(cause)
        free[rank] = event
        for key in outputs:
            makers[key] = event
        wires.send(rank, outputs, event.end)
    return events, causes


def upkeep_time(step: Upkeep, costs: StageCosts) -> float:
    """Return how long a link is busy with it."""
    if step.op == "RESHARD":
        return 0.0
    times = {"UNSHARD": costs.gather, "REDUCE_GRAD": costs.reduce}.get(step.op, costs.offload)
    return times[step.stage]


def _critical_path(events: list[list[Event]], causes: list[list[Event | None]]) -> tuple[Event, ...]:
    """Walk back from the last end: at each event, to the one that it waited for."""
    event = max((event for rank in events for event in reversed(rank)), key=lambda event: event.end, default=None)
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
        if isinstance(event.action, Upkeep) and event.end > event.start:
            what = f"{event.action.op} of stage {event.action.stage}"
            times[what] = times.get(what, 0.0) + event.end - event.start
        for action in event.action.actions:
            what = f"{action.op} of stage {action.stage}"
            times[what] = times.get(what, 0.0) + costs.of(action.op, action.stage) * costs.pace(event.action)
    ordered = sorted(times.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Bottleneck(what, time, time / clock) for what, time in ordered if time > 0)
