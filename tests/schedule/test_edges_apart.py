"""Messages that take longer between some ranks than between others, as from one machine to the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import invented, named
from slow_checker import makespan

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs

TWO_MACHINES = [[0.0, 0.1, 1.0, 1.0], [0.1, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.1], [1.0, 1.0, 0.1, 0.0]]


def rising(ranks: int) -> list[list[float]]:
    """Every direction of every pair has a time of its own."""
    return [[0.0 if a == b else 0.1 + 0.2 * a + 0.05 * b for b in range(ranks)] for a in range(ranks)]


@given(st.one_of(named(), invented()))
def test_times_are_those_of_a_slow_relaxation(s):
    costs = Costs(F=1.0, I=1.5, W=0.7, comm=rising(s.ranks))
    assert s.simulate(costs).makespan == pytest.approx(makespan(s, costs))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_one_number_between_all_is_that_number(name):
    plan = schedule.make(name, ranks=4, microbatches=8)
    same = Costs(I=1.5, comm=[[0.4] * 4] * 4)
    found, expected = plan.simulate(same), plan.simulate(Costs(I=1.5, comm=0.4))
    assert (found.makespan, found.period, found.events) == (expected.makespan, expected.period, expected.events)


def test_a_slow_link_costs_as_much_as_it_is_used():
    plan = schedule.make("gpipe", ranks=4, microbatches=1)
    assert plan.simulate(Costs(comm=TWO_MACHINES)).makespan == pytest.approx(4 + 8 + 2 * (0.1 + 1.0 + 0.1))


def test_directions_are_apart():
    plan = schedule.make("gpipe", ranks=2, microbatches=1)
    assert plan.simulate(Costs(comm=[[0, 3], [0, 0]])).makespan == 6 + 3
    assert plan.simulate(Costs(comm=[[0, 0], [5, 0]])).makespan == 6 + 5


@pytest.mark.parametrize("per_rank", [1, 2])
def test_a_search_knows_them_and_its_bound_holds(per_rank):
    costs = Costs(F=1.0, I=1.2, W=0.8, comm=TWO_MACHINES)
    limits = {"ranks": 4, "microbatches": 8, "memory_limit": 4}
    plan = schedule.search(costs, stages_per_rank=per_rank, **limits).check()
    named = schedule.make("zb-h1" if per_rank == 1 else "zb-v", ranks=4, microbatches=8)
    found = plan.simulate(costs)
    assert found.span <= named.simulate(costs).span + 1e-9
    assert schedule.lower_bound(costs, stages_per_rank=per_rank, **limits) <= found.span + 1e-9


@given(st.lists(st.floats(0, 2), min_size=4, max_size=4))
def test_nothing_is_below_the_bound(times):
    comm = [[0.0, times[0], times[1]], [times[2], 0.0, times[3]], [times[1], times[0], 0.0]]
    costs = Costs(F=1.0, I=1.1, W=0.9, comm=comm)
    bound = schedule.lower_bound(costs, ranks=3, microbatches=3, memory_limit=2)
    for name in ("1f1b", "zb-h1"):
        timeline = schedule.make(name, ranks=3, microbatches=3).simulate(costs)
        assert timeline.peak_memory > 2 or timeline.span >= bound - 1e-9


def test_what_was_measured_is_what_was_true():
    truth = Costs(F=(1.0,) * 4, I=(1.2,) * 4, W=(0.1,) * 4, comm=TWO_MACHINES)
    run = schedule.make("zb-h1", ranks=4, microbatches=8).simulate(truth)
    found = schedule.measured_costs(run, Costs())
    assert found.comm[1][2] == pytest.approx(1.0)
    assert found.comm[2][1] == pytest.approx(1.0)
    assert found.comm[0][1] == pytest.approx(0.1)
    assert run.schedule.simulate(found).period == pytest.approx(run.period)


def test_one_number_was_measured_where_all_are_alike():
    run = schedule.make("1f1b", ranks=4, microbatches=8).simulate(Costs(comm=0.25))
    assert schedule.measured_costs(run, Costs()).comm == pytest.approx(0.25)


@pytest.mark.parametrize("comm", [[], [[0.0, 1.0]], [[0.0, 1.0], [1.0]], [0.0, 1.0], [[0, 1], "ab"]])
def test_other_shapes_are_refused(comm):
    with pytest.raises(ScheduleError, match=r"comm must be one number, or as many rows|a cost must be a number"):
        Costs(comm=comm)


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(ScheduleError, match="comm must have one row for each of the 2 ranks; got 4"):
        schedule.make("1f1b", ranks=2, microbatches=2).simulate(Costs(comm=TWO_MACHINES))


def test_the_page_of_a_plan_shows_the_slowest_of_each_rank(tmp_path):
    timeline = schedule.make("1f1b", ranks=4, microbatches=4).simulate(Costs(comm=TWO_MACHINES))
    timeline.to_html(tmp_path / "plan.html")
    assert "comm = 1:1:1:1" in (tmp_path / "plan.html").read_text()
