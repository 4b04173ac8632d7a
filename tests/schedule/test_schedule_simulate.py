"""Times, idle time, bubble rate, memory and the critical path, on schedules small enough to do by hand."""

import pytest

from sternway import schedule
from sternway.schedule import Action, Costs, Overlap, Schedule


def times(timeline, rank):
    return {str(e.action): (e.start, e.end) for e in timeline.events[rank]}


def test_two_ranks_by_hand():
    t = schedule.make("1f1b", ranks=2, microbatches=2).simulate(Costs(F=1, I=2, W=3, comm=0.5))
    assert times(t, 0) == {"0F0": (0, 1), "0F1": (1, 2), "0B0": (8, 13), "0B1": (14, 19)}
    assert times(t, 1) == {"1F0": (1.5, 2.5), "1B0": (2.5, 7.5), "1F1": (7.5, 8.5), "1B1": (8.5, 13.5)}
    assert t.makespan == 19
    assert t.busy == (12, 12)
    assert t.idle == (7, 0)


def test_bubble_rate_is_of_the_longest_rank_and_not_of_the_makespan():
    t = schedule.make("zb-h2", ranks=4, microbatches=12).simulate()
    assert t.makespan == 39  # the last rank starts three later, and ends three later
    assert t.span == 36
    assert t.bubble_rate == 0


def test_bubble_rate_of_uneven_stages_is_that_of_the_busiest_rank():
    t = schedule.make("1f1b", ranks=2, microbatches=4).simulate(Costs(F=[1.0, 3.0], I=0.0, W=0.0))
    assert t.busy == (4, 12)
    assert t.span == 13  # rank 0 waits for the last gradient
    assert t.bubble_rate == pytest.approx(1 / 13)


def test_stages_of_one_rank_do_not_wait_for_communication():
    s = schedule.make("zb-v", ranks=1, microbatches=1)
    assert s.simulate(Costs(comm=100.0)).makespan == 3


def test_a_pair_takes_the_time_of_both_and_ends_both():
    pair = Overlap(Action(0, "F", 1), Action(0, "B", 0))
    s = Schedule("mine", 2, ((0,),), ((Action(0, "F", 0), pair, Action(0, "B", 1)),)).check()
    t = s.simulate(Costs(F=1, I=2, W=4))
    assert [(e.start, e.end) for e in t.events[0]] == [(0, 1), (1, 8), (8, 14)]
    assert t.peak_memory == 2


def test_memory_over_time():
    t = schedule.make("zb-h1", ranks=1, microbatches=2).simulate(Costs(memory_after_I=0.25))
    assert t.memory == (((0, 1), (2, 0.25), (3, 1), (5, 0.25), (6, 0)),)
    assert t.peaks == (1,)


def test_i_may_leave_more_than_f_kept():
    t = schedule.make("zb-h1", ranks=1, microbatches=1).simulate(Costs(memory_after_I=1.5))
    assert t.peak_memory == 1.5


def test_critical_path_and_what_would_help_most():
    t = schedule.make("1f1b", ranks=2, microbatches=2).simulate(Costs(F=1, I=2, W=3, comm=0.5))
    assert [str(e.action) for e in t.critical_path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert [(b.what, b.time) for b in t.bottlenecks] == [
        ("B of stage 1", 10),
        ("B of stage 0", 5),
        ("F of stage 1", 2),
        ("F of stage 0", 1),
        ("comm", 1),
    ]
    assert t.bottlenecks[0].share == pytest.approx(10 / 19)


def test_what_would_help_most_does_help():
    s = schedule.make("zb-h1", ranks=4, microbatches=8)
    costs = {x: [1.0, 1.0, 1.0, 1.0] for x in "FIW"}
    costs["I"][2] = 3.0
    slow = s.simulate(Costs(**costs))
    assert slow.bottlenecks[0].what == "I of stage 2"
    costs["I"][2] = 2.9
    assert s.simulate(Costs(**costs)).makespan == pytest.approx(slow.makespan - slow.bottlenecks[0].time / 30)


def test_costs_of_nothing():
    t = schedule.make("1f1b", ranks=2, microbatches=2).simulate(Costs(F=0, I=0, W=0))
    assert (t.makespan, t.span, t.bubble_rate, t.bottlenecks) == (0, 0, 0, ())
    assert t.draw().startswith("1f1b")
    assert t.to_svg().startswith("<svg")
