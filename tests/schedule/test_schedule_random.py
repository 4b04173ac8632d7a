"""Random schedules, whole and broken, against the slow checker that shares no code with the library."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import edited, invented, named
from slow_checker import is_valid, makespan, peak_memory, rendezvous

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs

any_schedule = st.one_of(named(), invented())
slow = settings(max_examples=300, deadline=None)
times = st.floats(0.0, 4.0)


def accepts(s) -> bool:
    try:
        s.check()
    except ScheduleError as error:
        return not (error.rule and error.got and error.fix)  # an error that does not help is no rejection
    return True


@slow
@given(any_schedule)
def test_what_can_run_is_accepted(s):
    assert is_valid(s)
    assert s.check() is s


@slow
@given(edited(any_schedule))
def test_one_edit_is_rejected_exactly_if_the_slow_checker_rejects_it(s):
    assert accepts(s) == is_valid(s)


@slow
@given(edited(edited(any_schedule)))
def test_two_edits_likewise(s):
    assert accepts(s) == is_valid(s)


@slow
@given(any_schedule, times, times, times, times)
def test_times_are_those_of_a_slow_relaxation(s, f, i, w, comm):
    costs = Costs(F=f, I=i, W=w, comm=comm)
    assert s.simulate(costs).makespan == pytest.approx(makespan(s, costs))


@slow
@given(invented(), st.data())
def test_times_with_a_cost_for_each_stage(s, data):
    costs = Costs(
        **{x: data.draw(st.lists(times, min_size=s.num_stages, max_size=s.num_stages)) for x in "FIW"},
        comm=0.5,
    )
    assert s.simulate(costs).makespan == pytest.approx(makespan(s, costs))


@slow
@given(any_schedule, st.floats(0.0, 1.0))
def test_memory_is_that_of_the_slow_count(s, after):
    costs = Costs(memory_after_I=after)
    peak = s.simulate(costs).peak_memory
    assert peak == pytest.approx(peak_memory(s, after))
    assert s.check(memory_limit=peak, costs=costs) is s
    with pytest.raises(ScheduleError, match=r"a rank must keep at most .* at .* \(rank \d+, step \d+\)"):
        s.check(memory_limit=peak - 0.01, costs=costs)


@slow
@given(any_schedule)
def test_every_format_reads_back(s):
    assert schedule.from_json(s.to_json()) == s
    assert schedule.from_csv(s.to_csv(), name=s.name) == s
    assert schedule.from_csv(s.to_csv("compute_comms"), name=s.name, dialect="compute_comms") == s


@slow
@given(any_schedule)
def test_transfers_never_hang_even_if_both_sides_block(s):
    assert rendezvous(s.to_csv("compute_comms"), s.placement)


@slow
@given(any_schedule, times, times)
def test_the_critical_path_explains_the_makespan(s, f, comm):
    costs = Costs(F=f, comm=comm)
    t = s.simulate(costs)
    clock = 0.0
    for before, event in zip((None, *t.critical_path), t.critical_path, strict=False):
        gap = event.start - clock
        assert gap == pytest.approx(0.0) or (gap == pytest.approx(comm) and before.rank != event.rank)
        clock = event.end
    assert clock == t.makespan
    assert sum(b.time for b in t.bottlenecks) == pytest.approx(t.makespan)
