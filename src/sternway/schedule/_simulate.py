"""When does every action run? An exact event simulation, in time proportional to the number of actions.

Each rank runs its actions in order, each as soon as the rank is free and its inputs have arrived:

    F of stage s    needs F of stage s-1           (the activation)
    I, B of s       needs I or B of stage s+1      (the gradient), and F of s
    W of s          needs I of s
    F with B        needs what both need, takes the time of both, and both end together

A result is there at once on the rank that made it and ``comm`` later on any other. Sends do not hold a
rank up. Ranks that have to wait are parked at the action they wait for, so that nothing is looked at
twice.
"""

import math
from collections import deque

from sternway.errors import ScheduleError
from sternway.schedule._action import Action
from sternway.schedule._costs import Costs, StageCosts
from sternway.schedule._memory import peak
from sternway.schedule._schedule import Schedule
from sternway.schedule._timeline import Bottleneck, Event, Timeline

_NOT_MADE = -1.0


class _Run:
    """The state of one simulation: results made so far, and which rank waits for which.

    A result is an activation or a gradient of one stage and microbatch; its key is a place in flat lists,
    which is what makes a hundred thousand actions a matter of a fraction of a second.
    """

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self.schedule, self.costs = schedule, costs
        self.n_microbatches, self.num_stages = schedule.n_microbatches, schedule.num_stages
        keys = 2 * self.num_stages * self.n_microbatches
        self.ends = [_NOT_MADE] * keys
        self.makers: list[Event | None] = [None] * keys
        self.waiting: dict[int, int] = {}
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        # The event that each step waited for last, if for any.
        self.causes: list[list[Event | None]] = [[] for _ in schedule.actions]

    def keys(self, action: Action) -> tuple[int, int, int]:
        """Return the keys of what an action makes and of the two results it needs, -1 for none."""
        stage, op, microbatch = action.stage, action.op, action.microbatch
        m = self.n_microbatches
        if stage >= self.num_stages or microbatch >= m:
            raise ScheduleError(
                f"a schedule has stages below {self.num_stages} and microbatches below {m}",
                got=str(action),
                fix="call check(), which says where it is",
            )
        activation = 2 * stage * m + microbatch
        if op == "F":
            return activation, activation - 2 * m if stage else -1, -1
        if op == "W":
            return -1, activation + m, -1
        return activation + m, activation + 3 * m if stage + 1 < self.num_stages else -1, activation

    def advance(self, rank: int) -> list[int]:
        """Run a rank until it has to wait or is done; return the ranks that can go on because of it."""
        steps, events, causes = self.schedule.actions[rank], self.events[rank], self.causes[rank]
        ends, makers, comm, cost, keys = self.ends, self.makers, self.costs.comm, self.costs.of, self.keys
        last = events[-1] if events else None
        woken: list[int] = []
        for index in range(len(events), len(steps)):
            step = steps[index]
            start, cause = (last.end, last) if last else (0.0, None)
            length, made = 0.0, []
            for action in step.actions:
                makes, one, other = keys(action)
                for need in (one, other):
                    if need < 0:
                        continue
                    end = ends[need]
                    if end == _NOT_MADE:
                        self.waiting[need] = rank
                        return woken
                    # Only a result that is later than the rank's own clock can matter.
                    if end + comm > start:
                        maker = makers[need]
                        assert maker is not None
                        arrival = end if maker.rank == rank else end + comm
                        if arrival > start:
                            start, cause = arrival, maker
                length += cost(action.op, action.stage)
                if makes >= 0:
                    made.append(makes)
            last = Event(rank, index, step, start, start + length)
            events.append(last)
            causes.append(cause)
            for key in made:
                ends[key], makers[key] = last.end, last
                if key in self.waiting:
                    woken.append(self.waiting.pop(key))
        return woken


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:  # noqa: B008 - frozen, so safely shared
    """Time every action of a schedule.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("gpipe", ranks=2, microbatches=2)
        >>> [(str(e.action), e.start, e.end) for e in simulate(s).events[1]]
        [('1F0', 1.0, 2.0), ('1F1', 2.0, 3.0), ('1B0', 3.0, 5.0), ('1B1', 5.0, 7.0)]

    Args:
        schedule: one that ``check`` accepts.
        costs: of one microbatch through one rank's share; see ``Costs``.

    Raises:
        ScheduleError: the schedule cannot run to its end, or the costs do not fit it.
    """
    ScheduleError.unless(isinstance(schedule, Schedule), "a Schedule is timed", schedule, "make one")
    ScheduleError.unless(isinstance(costs, Costs), "costs are a Costs", costs, "pass schedule.Costs(F=1, I=1, W=1)")
    per_stage = costs.per_stage(schedule.placement)
    run = _Run(schedule, per_stage)
    _run_all(run)
    events = tuple(tuple(rank) for rank in run.events)
    busy = tuple(math.fsum(e.end - e.start for e in rank) for rank in events)
    spans = tuple(rank[-1].end - rank[0].start if rank else 0.0 for rank in events)
    makespan = max((rank[-1].end for rank in events if rank), default=0.0)
    span, work = max(spans), max(busy)
    path = _critical_path(run)
    return Timeline(
        schedule=schedule,
        costs=costs,
        events=events,
        makespan=makespan,
        busy=busy,
        idle=tuple(max(0.0, span - used) for span, used in zip(spans, busy, strict=True)),
        span=span,
        bubble_rate=max(0.0, (span - work) / span) if span > 0 else 0.0,  # rounding may leave less than none
        peaks=tuple(
            peak(steps, stages=max(1, len(stages)), memory_after_i=costs.memory_after_I)
            for steps, stages in zip(schedule.actions, schedule.placement, strict=True)
        ),
        critical_path=path,
        bottlenecks=_bottlenecks(path, per_stage, makespan),
    )


def _run_all(run: _Run) -> None:
    """Advance every rank to its end, or say which cannot get there and why."""
    ready = deque(range(run.schedule.ranks))
    while ready:
        ready.extend(run.advance(ready.popleft()))
    for rank, steps in enumerate(run.schedule.actions):
        reached = len(run.events[rank])
        if reached < len(steps):
            raise ScheduleError(
                "every action's inputs are made by an action that can run before it",
                got=f"{steps[reached]} (rank {rank}, step {reached}), which waits for ever",
                fix="call check(), which names the cause",
            )


def _critical_path(run: _Run) -> tuple[Event, ...]:
    """Walk back from the last end: at each event, to the one that it waited for."""
    last = max((rank[-1] for rank in run.events if rank), key=lambda event: event.end, default=None)
    path = [] if last is None else [last]
    while path:
        cause = run.causes[path[-1].rank][path[-1].step]
        if cause is None:
            break
        path.append(cause)
    return tuple(reversed(path))


def _bottlenecks(path: tuple[Event, ...], costs: StageCosts, makespan: float) -> tuple[Bottleneck, ...]:
    """Sum the critical path by what it is made of."""
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
    return tuple(Bottleneck(what, time, time / makespan) for what, time in ordered if time > 0)
