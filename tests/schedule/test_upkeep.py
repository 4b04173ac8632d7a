"""Sharded stages in a schedule: where they are gathered, reduced and freed, when, in what memory, and how drawn."""

import json

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs, Upkeep

RANKS, MICROBATCHES = 4, 8


def made(name):
    return schedule.make(name, ranks=RANKS, microbatches=MICROBATCHES)


def upkeep(steps, op):
    return [step.stage for step in steps if isinstance(step, Upkeep) and step.op == op]


@pytest.mark.parametrize("name", schedule.names())
def test_each_stage_is_gathered_once_and_reduced_right_after_its_last_backward(name):
    plain = made(name)
    s = schedule.sharded(plain).check()
    for rank, steps in enumerate(s.actions):
        assert [step for step in steps if not isinstance(step, Upkeep)] == list(plain.actions[rank])
        for op in ("UNSHARD", "REDUCE_GRAD", "RESHARD"):
            assert sorted(upkeep(steps, op)) == sorted(plain.placement[rank])
        for stage in plain.placement[rank]:
            place = steps.index(Upkeep(stage, "REDUCE_GRAD"))
            computing = [step for step in steps[:place] if not isinstance(step, Upkeep)]
            assert stage in {action.stage for action in computing[-1].actions}
            assert not any(action.stage == stage for step in steps[place:] for action in step.actions)
    assert schedule.sharded(s) == s
    assert schedule.sharded(s, stages=()) == plain


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "looped-bfs"])
@pytest.mark.parametrize("room", [1, 2])
def test_no_more_stages_are_gathered_than_there_is_room_for(name, room):
    s = schedule.sharded(schedule.make(name, ranks=2, microbatches=4), gathered=room).check()
    for steps in s.actions:
        now = 0
        for step in steps:
            if isinstance(step, Upkeep):
                now += {"UNSHARD": 1, "RESHARD": -1}.get(step.op, 0)
            assert now <= room
        assert now == 0
        assert len(upkeep(steps, "UNSHARD")) >= len(set(upkeep(steps, "UNSHARD")))


@pytest.mark.parametrize("name", schedule.names())
def test_what_costs_nothing_changes_no_time(name):
    plain, costs = made(name), Costs(F=1.0, I=1.5, W=0.5, comm=0.1)
    before, after = plain.simulate(costs), schedule.sharded(plain).simulate(costs)
    assert after.makespan == pytest.approx(before.makespan)
    assert after.period == pytest.approx(before.period)
    assert after.bubble_rate == pytest.approx(before.bubble_rate)
    assert after.peaks == before.peaks
    assert after.busy == pytest.approx(before.busy)


def test_gathering_is_waited_for_and_reducing_hides_behind_other_stages():
    s = schedule.sharded(schedule.from_csv("0F0,1F0,1B0,0B0"))
    assert str(s.actions[0]) == str(
        schedule.sharded(schedule.from_csv("0F0,1F0,1B0,0B0"), gathered=2).actions[0]
    )  # both stages fit
    t = s.simulate(Costs(F=[1.0, 1.0], I=[1.0, 1.0], W=[1.0, 1.0], gather=[3.0, 3.0], reduce=[1.0, 5.0]))
    times = {str(event.action): (event.start, event.end) for event in t.events[0]}
    assert times["0UNSHARD"] == (0.0, 3.0)
    assert times["1UNSHARD"] == (3.0, 6.0)  # one at a time, beside 0F0
    assert times["0F0"] == (3.0, 4.0)
    assert times["1F0"] == (6.0, 7.0)
    assert times["1REDUCE_GRAD"] == (9.0, 14.0)
    assert times["0B0"] == (9.0, 11.0)
    assert times["0REDUCE_GRAD"] == (14.0, 15.0)  # after the link is free
    assert t.makespan == t.period == 15.0
    assert t.busy == (6.0,)
    assert t.bottlenecks[0].what == "UNSHARD of stage 1" or t.bottlenecks[0].time >= 5.0


def test_a_step_among_steps_waits_for_its_reductions():
    s = schedule.sharded(schedule.make("1f1b", ranks=2, microbatches=4))
    free, priced = (s.simulate(Costs(gather=gather, reduce=gather)).period for gather in (0.0, 2.0))
    assert free < priced <= free + 4.0


def test_gathered_parameters_take_memory():
    s = schedule.sharded(schedule.make("gpipe", ranks=1, microbatches=2))
    assert s.simulate(Costs(memory_gathered=3.0)).peak_memory == 5.0
    assert s.simulate().peak_memory == 2.0
    curve = s.simulate().memory_of([100], [50], gathered=[1000])[0]
    assert curve == ((0.0, 1100), (1.0, 1200), (4.0, 1100), (6.0, 0))
    s.check(memory_limit=5.0, costs=Costs(memory_gathered=3.0))
    with pytest.raises(ScheduleError, match="a rank must keep at most 4"):
        s.check(memory_limit=4.0, costs=Costs(memory_gathered=3.0))
    with pytest.raises(ScheduleError, match="gathered must have one size for each of 1 stages; got 2"):
        s.simulate().memory_of([100], [50], gathered=[1, 2])


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_files_keep_it(name):
    s = schedule.sharded(made(name), gathered=1)
    assert schedule.from_json(s.to_json()) == s
    assert schedule.from_csv(s.to_csv("compute_comms"), name=name, upkeep=True) == s
    assert schedule.from_csv(s.to_csv("compute_comms"), name=name) == made(name)
    assert schedule.from_csv(s.to_csv(), name=name) == made(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD", r"got 0F0 \(rank 0, step 0\) of a stage that is not gathered"),
        (
            "0UNSHARD,0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD",
            r"got 0UNSHARD \(rank 0, step 1\) of a stage that is gathe",
        ),
        ("0UNSHARD,0F0,0REDUCE_GRAD,0B0,0RESHARD", r"got 0REDUCE_GRAD \(rank 0, step 2\) before step 3 of the stage"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD,0RESHARD", r"got 0REDUCE_GRAD \(rank 0, step 4\) again"),
        ("0UNSHARD,0F0,0RESHARD,0B0", r"got 0B0 \(rank 0, step 3\) of a stage that is not gathered"),
        ("0UNSHARD,0F0,0B0,0RESHARD", r"by the end of a step; got no 0REDUCE_GRAD \(rank 0, 4 steps\)"),
        ("0UNSHARD,0F0,0B0,0REDUCE_GRAD", r"by the end of a step; got no 0RESHARD"),
        ("0RESHARD,0F0,0B0", r"got 0RESHARD \(rank 0, step 0\) of a stage that is not gathered. Fix: add 0UNSHARD"),
        ("1UNSHARD,0F0,0B0", r"got 1UNSHARD \(rank 0, step 0\) of a stage that the rank does not hold"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ScheduleError, match=message):
        schedule.from_csv(text, upkeep=True).check()


def test_bad_arguments():
    with pytest.raises(ScheduleError, match="gathered must be a number of stages from 1 on"):
        schedule.sharded(made("1f1b"), gathered=0)
    with pytest.raises(ScheduleError, match="sharded needs a Schedule"):
        schedule.sharded("1f1b")
    with pytest.raises(ScheduleError, match="upkeep must have a stage, and be UNSHARD, RESHARD or REDUCE_GRAD"):
        Upkeep(-1, "UNSHARD")
    with pytest.raises(ScheduleError, match="upkeep must be written as stage and UNSHARD"):
        Upkeep.parse("0UNSHARDED")


def test_it_is_drawn():
    s = schedule.sharded(schedule.make("1f1b", ranks=2, microbatches=2))
    t = s.simulate(Costs(gather=1.0, reduce=2.0))
    assert t.draw() == (
        "1f1b: 2 ranks, 2 microbatches; makespan 12, bubble rate 45.5%, peak memory 2\n"
        "rank 0 |.  F0 F1 .     B0--- .  B1--- .     |\n"
        "link   |U- .                          R---- |\n"
        "rank 1 |.     F0 B0--- F1 B1--- .           |\n"
        "link   |U- .                    R---- .     |"
    )
    svg = t.to_svg()
    assert "1REDUCE_GRAD: 8 to 10" in svg
    assert "gathers parameters" in svg
    trace = json.loads(t.to_chrome_trace())["traceEvents"]
    links = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    reductions = {e["name"]: (e["tid"], e["dur"]) for e in trace if e.get("cat") == "REDUCE_GRAD"}
    assert reductions["1REDUCE_GRAD"] == (links["rank 1: gathers and reductions"], 2000.0)
    assert "1F0" in str(s)
