"""Costs from steps that were run: how long each action took, and how long messages were on their way."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep
from sternway.schedule._again import shares
from sternway.schedule._between import between_actions, capped_mean
from sternway.schedule._costs import EPSILON, Costs
from sternway.schedule._stage_costs import StageCosts
from sternway.schedule._timeline import Timeline

_ON_LINK = ("UNSHARD", "REDUCE_GRAD")

_Kind = tuple[str, int]  # an action's op and stage


def measured_costs(timelines: Timeline | Sequence[Timeline], planned: Costs) -> Costs:
    """Return the costs that measured timelines show, one number for each stage: means over the microbatches.

    A step takes what its actions take in sum, so means make a plan as long as the run. Of an action that took more than
    twice as long as most, twice as long counts: what held it up is not the stage's.

    What the steps did not have is taken from ``planned``: where there is B alone, I and W share its time as they do
    there, and the other way round. A message's time is seen where a rank waits for it, for each pair of ranks on its
    own; where none waits, ``comm`` is at most the shortest time between an end and the start that needed it.
    ``comm_busy`` is seen where messages follow each other closely. Gathering and reducing are seen where they have a
    length; for stages where they have none, the planned times change as much as those of the others. ``overhead`` is
    the time between two actions of a rank, ``receive`` how much longer it is where a message had come, and ``spread``
    how much equal actions differ.

    Example:
        >>> from sternway import schedule
        >>> costs = schedule.Costs(F=(2.0, 3.0), I=(2.0, 2.0), W=(1.0, 1.0), comm=0.5)
        >>> run = schedule.make("zb-h1", ranks=2, microbatches=4).simulate(costs)
        >>> measured_costs(run, schedule.Costs()).F
        (2.0, 3.0)

    Args:
        timelines: of a step, as ``StepResult.timeline`` has it, or of several, with stages in the same places.
        planned: for what cannot be seen in them, and for memory.

    Raises:
        ScheduleError: there is no F of some stage, or the planned costs are for another number of stages.
    """
    runs = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    ScheduleError.unless(
        bool(runs) and all(isinstance(run, Timeline) for run in runs),
        "timelines must be a Timeline, or several",
        timelines,
        "pass a step's",
    )
    ScheduleError.unless(isinstance(planned, Costs), "planned must be a Costs", planned, "pass schedule.Costs()")
    schedule = runs[0].schedule
    ScheduleError.unless(
        all(
            (run.schedule.placement, run.schedule.recompute, run.schedule.copies)
            == (schedule.placement, schedule.recompute, schedule.copies)
            for run in runs
        ),
        "the stages of all timelines must be in the same places, and the same of them recomputed",
        [run.schedule.name for run in runs],
        "pass those of one pipeline",
    )
    expected = planned.per_stage(schedule.placement, copies=schedule.copies)
    times: dict[_Kind, list[float]] = defaultdict(list)
    for event in (event for run in runs for rank in run.events for event in rank):
        if isinstance(event.action, Action):
            times[event.action.op, event.action.stage].append(event.end - event.start)
    means = {kind: capped_mean(values) for kind, values in times.items()}
    seen = dict(means)
    lacking = [stage for stage in range(schedule.num_stages) if ("F", stage) not in seen]
    if lacking:
        raise ScheduleError("a measured step must have F of every stage", got=f"none of {lacking}", fix="pass a step's")
    for stage, share in shares(schedule.recompute).items():  # costs are those of a stage that is not recomputed
        for op in "IB":
            if (op, stage) in seen:
                once_more = share.whole * seen["F", stage] + share.selective * expected.selective[stage]
                seen[op, stage] = max(0.0, seen[op, stage] - once_more)
    between = between_actions(runs, expected.comm, planned.comm_busy)
    i, w, b = zip(*(_backward(seen, stage, expected) for stage in range(schedule.num_stages)), strict=True)
    f = tuple(seen["F", stage] for stage in range(schedule.num_stages))
    return replace(
        planned,
        F=f,
        I=i,
        W=w,
        B=b if planned.B is not None or any(op == "B" for op, _ in seen) else None,
        comm=between.comm,
        comm_busy=between.comm_busy,
        overhead=between.overhead,
        receive=between.receive,
        spread=_spread(times, means),
        turn=statistics.median(turns)
        if (turns := [run.turn for run in runs if run.turn is not None])
        else planned.turn,
        gather=_carried(runs, "UNSHARD", expected.gather, planned.gather),
        reduce=_carried(runs, "REDUCE_GRAD", expected.reduce, planned.reduce),
        overlap=_overlap(runs, f, b, expected.overlap),
    )


def _spread(times: Mapping[_Kind, Sequence[float]], means: Mapping[_Kind, float]) -> float:
    """The standard deviation of actions from the mean of their kind, as a share of it; no more than twice as long."""
    off = [min(2.0, time / means[kind]) - 1 for kind, each in times.items() if means[kind] for time in each]
    free = len(off) - len(times)
    found = math.sqrt(math.fsum(each**2 for each in off) / free) if free > 0 else 0.0
    return found if found > EPSILON else 0.0


def _overlap(
    runs: list[Timeline], f: Sequence[float], b: Sequence[float], planned: tuple[float, ...]
) -> float | tuple[float, ...]:
    """For the F of each stage, how long it and a B took overlapped, as a share of both alone; else as planned."""
    shares: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for event in (event for events in run.events for event in events):
            if isinstance(pair := event.action, Overlap):
                back = pair.backward.stage
                alone = f[pair.forward.stage] + b[back] + (f[back] if run.schedule.runs_again(pair) else 0.0)
                if alone:
                    shares[pair.forward.stage].append((event.end - event.start) / alone)
    found = tuple(statistics.median(shares[stage]) if stage in shares else one for stage, one in enumerate(planned))
    return found[0] if len(set(found)) == 1 else found


def _backward(seen: dict[tuple[str, int], float], stage: int, expected: StageCosts) -> tuple[float, float, float]:
    """I, W and B of a stage: those that were seen, and the others in the proportions that were expected."""
    i, w, b = (seen.get((op, stage)) for op in "IWB")
    apart = expected.I[stage] + expected.W[stage]
    if i is None or w is None:
        if b is None:
            raise ScheduleError(
                "a measured step must have a backward of every stage that is not overlapped",
                got=f"none of stage {stage}",
                fix="pass a step's",
            )
        share = expected.I[stage] / apart if apart else 0.5
        whole = b * (apart / expected.B[stage] if expected.B[stage] and apart else 1.0)
        return share * whole, (1 - share) * whole, b
    return i, w, b if b is not None else (i + w) * (expected.B[stage] / apart if apart else 1.0)


def _carried(
    runs: list[Timeline], op: str, expected: Sequence[float], planned: float | Sequence[float]
) -> float | Sequence[float]:
    """How long the link of a rank is busy with this for each stage; what was planned, if it has no length anywhere."""
    times: dict[int, list[float]] = defaultdict(list)
    for events in (events for run in runs for events in run.events):
        free = 0.0
        for event in events:
            if isinstance(event.action, Upkeep) and event.action.op in _ON_LINK and event.end > event.start:
                length, free = event.end - max(event.start, free), event.end
                if event.action.op == op and length > 0:
                    times[event.action.stage].append(length)
    if not times:
        return planned
    seen = {stage: statistics.median(values) for stage, values in times.items()}
    usual = statistics.median(seen.values())
    ratios = [time / expected[stage] for stage, time in seen.items() if expected[stage]]
    rest = [time * statistics.median(ratios) if time and ratios else usual for time in expected]
    return [seen.get(stage, rest[stage]) for stage in range(len(expected))]
