"""An overlapped pair has a time of its own: given, simulated, measured, and counted by lower bounds."""

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs

COSTS = Costs(F=1.0, I=1.2, W=0.7, overlap=0.8)


def pairs(timeline):
    return [event for events in timeline.events for event in events if len(event.action.actions) == 2]


def test_a_pair_takes_its_share_of_both():
    s = schedule.make("dualpipe-v", ranks=2, microbatches=6)
    found = pairs(s.simulate(COSTS))
    assert len(found) > 4
    assert {round(event.end - event.start, 9) for event in found} == {round(0.8 * (1.0 + 1.9) / 2, 9)}
    by_stage = pairs(s.simulate(Costs(overlap=(0.7, 0.8, 0.9, 1.0))))
    for event in by_stage:
        assert event.end - event.start == pytest.approx(1.5 * (0.7, 0.8, 0.9, 1.0)[event.action.forward.stage])
    assert s.simulate() == s.simulate(Costs(overlap=1.0))


def test_a_forward_that_runs_again_is_overlapped_too():
    s = schedule.make("dualpipe-v", ranks=2, microbatches=4)
    again = schedule.Schedule(s.name, 4, s.placement, s.actions, recompute=(0, 1, 2, 3))
    assert {round(event.end - event.start, 9) for event in pairs(again.simulate(COSTS))} == {round(0.8 * 3.9 / 2, 9)}


@pytest.mark.parametrize("recompute", [(), (0, 3), (0, 1, 2, 3)])
def test_measured_steps_show_it(recompute):
    s = schedule.make("dualpipe-v", ranks=2, microbatches=6)
    s = schedule.Schedule(s.name, 6, s.placement, s.actions, recompute=recompute)
    found = schedule.measured_costs(s.simulate(COSTS), Costs(I=1.2, W=0.7))
    assert found.overlap == pytest.approx((0.8,) * 4)
    assert pytest.approx((0.5,) * 4) == found.F
    assert s.simulate(found).makespan == pytest.approx(s.simulate(COSTS).makespan)
    plain = schedule.make("zb-v", ranks=2, microbatches=6)  # which has no pairs: as planned
    assert schedule.measured_costs(plain.simulate(COSTS), COSTS).overlap == 0.8


@pytest.mark.parametrize("overlap", [1.0, 0.8, 0.6])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_schedule_beats_the_bound(ranks, overlap):
    costs = Costs(F=1.0, I=1.0, W=1.0, B=1.9, overlap=overlap)
    s = schedule.make("dualpipe-v", ranks=ranks, microbatches=8 * ranks)
    t = s.simulate(costs)
    least = schedule.lower_bound(
        costs, ranks=ranks, microbatches=8 * ranks, memory_limit=t.peak_memory, stages_per_rank=2
    )
    assert t.span >= least - 1e-9
    if ranks == 2:
        rows = schedule.compare(costs, ranks=2, microbatches=8, memory_limit=4).rows
        assert all(row.gap >= -1e-9 for row in rows if row.fits)


def test_it_is_a_cost():
    with pytest.raises(ScheduleError, match="a cost must be finite and not negative; got overlap=-1"):
        Costs(overlap=-1.0)
    with pytest.raises(ScheduleError, match=r"one number for each of the 4 stages; got 2 for overlap"):
        schedule.make("dualpipe-v", ranks=2, microbatches=4).simulate(Costs(overlap=(1.0, 0.9)))
