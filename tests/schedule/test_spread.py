"""Equal actions that take unequal time: a step takes longer than the means say, and measured steps show how much."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Costs, Schedule, Timeline

TRUTH = Costs(F=1.0, I=1.1, W=0.9, comm=0.1)


def uneven(plan: Schedule, costs: Costs, spread: float, steps: int, seed: int) -> tuple[float, list[Timeline]]:
    """The time of a step among many whose actions are drawn one by one, by brute force, and each step's timeline."""
    random, sigma = Random(seed), math.sqrt(math.log1p(spread**2))
    free, marks, timelines = [0.0] * plan.ranks, [0.0], []
    for _ in range(steps):
        ends: dict[Action, float] = {}
        times: list[list[tuple[float, float]]] = [[] for _ in plan.actions]
        while any(len(mine) < len(queue) for mine, queue in zip(times, plan.actions, strict=True)):
            for rank, queue in enumerate(plan.actions):
                while len(times[rank]) < len(queue):
                    action = queue[len(times[rank])]
                    assert isinstance(action, Action)
                    stage, i = action.stage, action.microbatch
                    needed = {
                        "F": [(Action(stage - 1, "F", i), costs.comm)] if stage else [],
                        "I": [(Action(stage, "F", i), 0.0)]
                        if stage == plan.num_stages - 1
                        else [(Action(stage + 1, "I", i), costs.comm)],
                        "W": [(Action(stage, "I", i), 0.0)],
                    }[action.op]
                    if any(key not in ends for key, _ in needed):
                        break
                    start = max([free[rank], *(ends[key] + away for key, away in needed)])
                    pace = random.lognormvariate(-(sigma**2) / 2, sigma)
                    free[rank] = ends[action] = start + pace * getattr(costs, action.op)
                    times[rank].append((start, free[rank]))
        marks.append(max(free))
        timelines.append(Timeline.measured(plan, times))
    first = steps // 4
    return (marks[-1] - marks[first]) / (steps - first), timelines


@pytest.mark.parametrize("spread", [0.1, 0.3])
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_as_long_as_many_uneven_steps(name: str, spread: float) -> None:
    plan = schedule.make(name, ranks=4, microbatches=8)
    expected, _ = uneven(plan, TRUTH, spread, steps=400, seed=1)
    even, found = (plan.simulate(replace(TRUTH, spread=each)).period for each in (0.0, spread))
    assert found == pytest.approx(expected, rel=0.015)
    assert abs(found - expected) < 0.3 * (expected - even), "of what it adds, most is seen"


def test_measured_steps_show_it() -> None:
    plan = schedule.make("zb-h1", ranks=4, microbatches=8)
    expected, timelines = uneven(plan, TRUTH, 0.2, steps=200, seed=2)
    found = schedule.measured_costs(timelines[50:60], Costs())
    assert found.spread == pytest.approx(0.2, rel=0.1)
    assert plan.simulate(found).period == pytest.approx(expected, rel=0.03)


def test_there_is_none_where_actions_are_equal() -> None:
    plan = schedule.make("zb-h1", ranks=4, microbatches=8)
    assert schedule.measured_costs(plan.simulate(TRUTH), Costs(spread=0.5)).spread == 0.0


def test_one_action_that_was_held_up_counts_twice_at_most() -> None:
    plan = schedule.make("gpipe", ranks=1, microbatches=8)
    events = plan.simulate(TRUTH).events[0]
    late = [[(e.start, e.end + (100.0 if e is events[-1] else 0.0)) for e in events]]
    assert schedule.measured_costs(Timeline.measured(plan, late), Costs()).spread < 0.3


@pytest.mark.parametrize("name", schedule.names())
def test_never_shorter_than_without(name: str) -> None:
    plan = schedule.make(name, ranks=4, microbatches=8)
    for spread in (0.001, 0.05, 0.4):
        timeline = plan.simulate(replace(TRUTH, spread=spread, turn=0.2))
        assert timeline.period >= plan.simulate(replace(TRUTH, turn=0.2)).period
        assert timeline.makespan == plan.simulate(TRUTH).makespan, "by the means"


def test_the_same_every_time_and_larger_where_it_is() -> None:
    plan = schedule.make("zb-v", ranks=4, microbatches=8)
    periods = [plan.simulate(replace(TRUTH, spread=spread)).period for spread in (0.1, 0.1, 0.2, 0.4)]
    assert periods[0] == periods[1] < periods[2] < periods[3]


def test_plans_are_ranked_by_it() -> None:
    running = schedule.make("zb-h2", ranks=4, microbatches=8)
    costs = replace(TRUTH, spread=0.3)
    found = schedule.candidates(running, costs, memory_limit=8, count=4)
    periods = [plan.simulate(costs).period for plan in found]
    assert periods == sorted(periods)


def test_the_page_of_a_plan_shows_it(tmp_path) -> None:
    plan = schedule.make("1f1b", ranks=2, microbatches=2)
    plan.simulate(replace(TRUTH, spread=0.25)).to_html(tmp_path / "plan.html")
    assert "spread = 0.25" in (tmp_path / "plan.html").read_text()


def test_a_spread_is_a_number() -> None:
    with pytest.raises(ScheduleError, match=r"must be finite and not negative; got spread=-0.1"):
        Costs(spread=-0.1)
