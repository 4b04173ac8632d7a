"""The period: what a step costs when steps follow each other, against a simulation of many steps in a row."""

from __future__ import annotations

import pytest

from sternway import schedule
from sternway.schedule import Costs

UNEVEN = Costs(F=1.0, I=1.5, W=0.7, comm=0.4)


def many_steps(plan: schedule.Schedule, costs: Costs, count: int) -> float:
    """How much longer ``count`` steps in a row take than half of them, for one step: by brute force."""
    per_stage = costs.per_stage(plan.placement, copies=plan.copies)
    depth = plan.num_stages // plan.copies
    ends: dict[tuple[int, str, int, int], float] = {}
    free = [0.0] * plan.ranks
    marks = []
    for number in range(count):
        queues = [list(steps) for steps in plan.actions]
        while any(queues):
            moved = False
            for rank, queue in enumerate(queues):
                while queue:
                    start, ready = free[rank], True
                    for action in queue[0].actions:
                        stage, i = action.stage, action.microbatch
                        needed = {
                            "F": [(number, "F", stage - 1, i)] if stage % depth else [],
                            "W": [(number, "I", stage, i)],
                        }.get(
                            action.op, [(number, "I", stage + 1, i) if (stage + 1) % depth else (number, "F", stage, i)]
                        )
                        for key in needed:
                            ready &= key in ends
                            away = plan.rank_of(key[2]) != rank
                            start = max(start, ends.get(key, 0.0) + away * costs.comm)
                    if not ready:
                        break
                    moved = True
                    for action in queue[0].actions:
                        start += per_stage.of(action.op, action.stage)
                    free[rank] = start
                    for action in queue.pop(0).actions:
                        ends[number, "I" if action.op == "B" else action.op, action.stage, action.microbatch] = start
            assert moved
        marks.append(max(free))
    half = count // 2
    return (marks[-1] - marks[half - 1]) / (count - half)


@pytest.mark.parametrize("costs", [Costs(), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("name", schedule.names() + schedule.names(copies=2))
def test_as_many_steps_in_a_row(name: str, costs: Costs) -> None:
    plan = schedule.make(name, ranks=4, microbatches=8)
    timeline = plan.simulate(costs)
    assert timeline.period == pytest.approx(many_steps(plan, costs, 16), rel=0.02)
    assert max(timeline.busy) <= timeline.period + 1e-9
    assert timeline.period <= timeline.span + 1e-9


def test_a_measured_timeline_repeats_after_its_span() -> None:
    plan = schedule.make("1f1b", ranks=2, microbatches=4)
    simulated = plan.simulate()
    times = [[(e.start, e.end) for e in rank] for rank in simulated.events]
    measured = schedule.Timeline.measured(plan, times)
    assert measured.period == measured.span == simulated.span
    assert measured.turn is None


def test_the_time_between_two_steps_counts() -> None:
    plan, costs = schedule.make("zb-h2", ranks=4, microbatches=8), Costs(turn=2.0)
    simulated = plan.simulate(costs)
    assert simulated.period == plan.simulate().period + 2.0
    assert simulated.makespan == plan.simulate().makespan, "of one step alone"
    times = [[(e.start, e.end) for e in rank] for rank in simulated.events]
    measured = schedule.Timeline.measured(plan, times, turn=2.0)
    first = simulated.events[plan.rank_of(0)]
    assert measured.period == 2.0 + first[-1].end - first[0].start
    assert schedule.measured_costs(measured, Costs()).turn == 2.0
    assert schedule.measured_costs(schedule.Timeline.measured(plan, times), costs).turn == 2.0, "as planned"
