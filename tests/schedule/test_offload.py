"""What F keeps is away until its backward: placed within a limit, timed on links of their own, checked and drawn."""

import itertools
import json

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Costs, Upkeep, _offload, from_json, make, offloaded
from sternway.schedule._memory import kept_by

COSTS = Costs(F=1.0, I=1.0, W=1.0, comm=0.1, memory_after_I=0.2, offload=0.5)


def read(text):
    return schedule.from_csv(text, upkeep=True)


def moves(s):
    return sum(isinstance(step, Upkeep) for steps in s.actions for step in steps)


def test_the_computation_waits_for_what_must_be_gone_and_for_what_comes_back():
    s = read("0F0,0OFFLOAD0,0F1,0F2,0B1,0RELOAD0,0B2,0B0")
    t = s.check().simulate(Costs(F=1.0, I=1.0, W=1.0, offload=3.0))
    times = {str(event.action): (event.start, event.end) for event in t.events[0]}
    assert times["0OFFLOAD0"] == (1.0, 4.0)  # from the end of its F
    assert times["0F1"] == (4.0, 5.0)  # which has to wait
    assert times["0RELOAD0"] == (8.0, 11.0)
    assert times["0B2"] == (8.0, 10.0)  # beside it
    assert times["0B0"] == (11.0, 13.0)
    assert t.makespan == t.period == 13.0
    assert t.busy == (9.0,)
    assert (
        t.memory
        == (
            (
                (0.0, 1.0),
                (5.0, 2.0),
                (6.0, 2.0),
            ),
        )
        or t.peak_memory == 2.0
    )
    assert {b.what for b in t.bottlenecks} >= {"OFFLOAD of stage 0", "RELOAD of stage 0"}
    assert s.simulate().makespan == s.simulate().period == 9.0  # moves that cost nothing


def test_moves_of_a_direction_follow_each_other():
    s = read("0F0,0F1,0OFFLOAD0,0OFFLOAD1,0F2,0B2,0RELOAD0,0RELOAD1,0B0,0B1")
    t = s.check().simulate(Costs(offload=2.0))
    times = {str(event.action): (event.start, event.end) for event in t.events[0]}
    assert times["0OFFLOAD0"] == (1.0, 3.0)
    assert times["0OFFLOAD1"] == (3.0, 5.0)
    assert times["0F2"] == (5.0, 6.0)
    assert times["0RELOAD0"] == (8.0, 10.0)
    assert times["0RELOAD1"] == (10.0, 12.0)
    assert t.period == t.makespan


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize("share", [0.75, 0.55])
def test_any_schedule_within_less_memory(name, share):
    plain = make(name, ranks=4, microbatches=8)
    before = plain.simulate(COSTS)
    limit = share * before.peak_memory
    s = offloaded(plain, COSTS, memory_limit=limit).check(memory_limit=limit, costs=COSTS)
    t = s.simulate(COSTS)
    assert t.peak_memory <= limit + 1e-9
    assert moves(s) > 0
    assert t.span >= before.span - 1e-9
    assert offloaded(s, COSTS, memory_limit=before.peak_memory) == plain
    for steps, old in zip(s.actions, plain.actions, strict=True):
        assert tuple(step for step in steps if not isinstance(step, Upkeep)) == old
    assert from_json(s.to_json()) == s
    assert schedule.from_csv(s.to_csv(), name=name) == plain
    assert schedule.from_csv(s.to_csv("compute_comms"), name=name) == plain
    shards = schedule.sharded(s).check()
    assert moves(shards) > moves(s)


def test_a_link_with_time_hides_it():
    plain = make("1f1b", ranks=4, microbatches=8)
    quick = offloaded(plain, Costs(offload=0.01), memory_limit=2).simulate(Costs(offload=0.01))
    assert quick.span <= plain.simulate().span * 1.02
    slow = offloaded(plain, Costs(offload=4.0), memory_limit=2).simulate(Costs(offload=4.0))
    assert slow.span > quick.span


def test_no_other_places_of_the_same_moves_are_shorter_in_a_tiny_case():
    """All places of OFFLOAD and RELOAD of each set of microbatches, on one rank with three of them."""
    costs, limit = Costs(F=1.0, I=1.0, W=1.0, offload=0.75), 2.0
    plain = make("gpipe", ranks=1, microbatches=3)
    steps, best = plain.actions[0], float("inf")
    backward = {step.microbatch: index for index, step in enumerate(steps) if step.op == "B"}
    for size in range(4):
        for chosen in itertools.combinations(range(3), size):
            options = [
                [(out, back) for out in range(i + 1, backward[i] + 1) for back in range(out, backward[i] + 1)]
                for i in chosen
            ]
            for places in itertools.product(*options):
                before = {index: [] for index in range(len(steps))}
                for i, (out, _) in zip(chosen, places, strict=True):
                    before[out].append(Upkeep(0, "OFFLOAD", i))
                for i, (_, back) in zip(chosen, places, strict=True):
                    before[back].append(Upkeep(0, "RELOAD", i))
                row = tuple(each for index, step in enumerate(steps) for each in (*before[index], step))
                trial = schedule.Schedule("trial", 3, plain.placement, (row,))
                timeline = trial.check().simulate(costs)
                if timeline.peak_memory <= limit + 1e-9:
                    best = min(best, timeline.span)
    assert offloaded(plain, costs, memory_limit=limit).simulate(costs).span == pytest.approx(best)


def test_what_stays_of_a_microbatch_counts():
    costs = Costs(memory_offloaded=0.25)
    s = read("0F0,0OFFLOAD0,0F1,0OFFLOAD1,0F2,0B2,0RELOAD1,0B1,0RELOAD0,0B0").check()
    assert s.simulate(costs).peak_memory == 1.5
    assert s.simulate(Costs()).peak_memory == 1.0
    assert s.simulate(Costs(memory_offloaded=2.0)).peak_memory == 3.0  # more than there is stays: nothing is gained
    plain = make("1f1b", ranks=4, microbatches=8)
    for stays in (0.0, 0.25):
        costs = Costs(offload=0.1, memory_offloaded=stays)
        assert offloaded(plain, costs, memory_limit=2.5).simulate(costs).peak_memory <= 2.5
    with pytest.raises(ScheduleError, match="1f1b cannot stay within the memory limit"):
        offloaded(plain, Costs(memory_offloaded=0.5), memory_limit=1.5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "zb-v"])
def test_the_smallest_that_a_schedule_can_be_is_named_and_made(name):
    costs = Costs(offload=0.1, memory_after_I=0.2, memory_offloaded=0.1)
    plain = make(name, ranks=3, microbatches=6)
    least = offloaded(plain, costs, memory_limit=None).check().simulate(costs).peak_memory
    assert least < plain.simulate(costs).peak_memory
    assert offloaded(plain, costs, memory_limit=least).simulate(costs).peak_memory <= least + 1e-9
    with pytest.raises(ScheduleError, match=rf"Fix: pass {least:g} or more, or recompute stages"):
        offloaded(plain, costs, memory_limit=least - 0.01)


@pytest.mark.parametrize("name", ["gpipe", "zb-h2"])
def test_as_few_are_moved_as_fit(name):
    """No smaller number of those that wait longest fits, in any of the ways."""
    steps = make(name, ranks=1, microbatches=8).actions[0]
    for way, limit in itertools.product(_offload._WAYS, range(3, 9)):
        waits, amounts = _offload._waits(steps), ([1.0], [0.5])
        rows = [_offload._placed(steps, dict(waits[:count]), way) for count in range(len(waits) + 1)]
        fitting = [row for row in rows if max(map(max, kept_by(row, *amounts))) <= limit]
        assert _offload._fewest(steps, amounts, limit, way) == (fitting[0] if fitting else None)


def test_a_comparison_lists_what_fits_with_moves():
    costs = Costs(memory_input=0.1, offload=0.2)
    found = schedule.compare(costs, ranks=2, microbatches=4, memory_limit=1.2, recompute=True, offload=True)
    names = [row.name for row in found.rows]
    assert "1f1b, offloaded" in names
    assert "1f1b, recomputed" in names
    assert moves(found.best.schedule)
    assert all(row.fits for row in found.rows if row.name.endswith("offloaded"))
    assert all(row.gap >= 0 for row in found.rows)
    assert found.verdict.endswith("above anything possible with unlimited memory")
    without = schedule.compare(costs, ranks=2, microbatches=4, memory_limit=1.2, recompute=True)
    assert found.best.timeline.span <= without.best.timeline.span
    assert not any(moves(row.schedule) for row in without.rows)


def test_other_plans_for_one_that_moves_may_move():
    costs = Costs(offload=0.1)
    running = offloaded(make("gpipe", ranks=2, microbatches=4), costs, memory_limit=1.0)
    found = schedule.candidates(running, costs, memory_limit=1.0, count=9)
    assert len(found) > 1
    assert all(moves(plan) and plan.check().simulate(costs).peak_memory <= 1.0 for plan in found)
    alone = offloaded(make("gpipe", ranks=2, microbatches=4), costs, memory_limit=None)
    assert schedule.candidates(alone, costs, memory_limit=0.5, count=9) == [alone]  # no other fits, which is no error


@pytest.mark.parametrize("recompute", [(), "auto"])
@pytest.mark.parametrize("time", [0.1, 3.0])
def test_the_search_moves_microbatches_where_that_is_shorter(time, recompute):
    costs = Costs(F=1.0, I=1.0, W=1.0, memory_input=0.1, offload=time)
    numbers = {"ranks": 2, "microbatches": 5, "memory_limit": 1.2, "recompute": recompute}
    found = schedule.search(costs, **numbers, offload=True)
    t = found.check(memory_limit=1.2, costs=costs).simulate(costs)
    assert t.span <= schedule.search(costs, **numbers).simulate(costs).span + 1e-9
    assert bool(moves(found)) == (time < 1.0)
    assert found.name.endswith("-offloaded") == bool(moves(found))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0OFFLOAD0,0F0,0RELOAD0,0B0", r"got 0OFFLOAD0 \(rank 0, step 0\) after nothing. Fix: put 0F0 before it"),
        ("0F0,0OFFLOAD0,0B0", r"got 0B0 \(rank 0, step 2\) of what is away. Fix: put 0RELOAD0 before it"),
        ("0F0,0RELOAD0,0B0", r"got 0RELOAD0 \(rank 0, step 1\) after F. Fix: put 0OFFLOAD0 before it"),
        ("0F0,0OFFLOAD0,0OFFLOAD0,0RELOAD0,0B0", r"got 0OFFLOAD0 \(rank 0, step 2\) after OFFLOAD"),
        ("0F0,0OFFLOAD0,0RELOAD0,0B0,0RELOAD0", r"got 0RELOAD0 \(rank 0, step 4\) after B"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ScheduleError, match=message):
        read(text).check()


def test_bad_arguments():
    with pytest.raises(ScheduleError, match=r"1f1b cannot stay within the memory limit.*got memory_limit=0.5"):
        offloaded(make("1f1b", ranks=2, microbatches=4), COSTS, memory_limit=0.5)
    with pytest.raises(ScheduleError, match="memory_limit must be one number, or one for each rank"):
        offloaded(make("1f1b", ranks=2, microbatches=4), COSTS, memory_limit=[1.0])
    with pytest.raises(ScheduleError, match="offloaded needs a Schedule"):
        offloaded("1f1b", COSTS, memory_limit=1)
    for bad in ((0, "OFFLOAD"), (0, "UNSHARD", 1), (0, "RELOAD", -1), (0, "RELOAD", "1")):
        with pytest.raises(ScheduleError, match="upkeep must have a stage, and be UNSHARD"):
            Upkeep(*bad)
    assert Upkeep.parse("3RELOAD12") == Upkeep(3, "RELOAD", 12)
    assert str(Action(0, "F", 1)) == "0F1"


def test_it_is_drawn():
    t = offloaded(make("1f1b", ranks=2, microbatches=2), Costs(offload=1.0), memory_limit=1).simulate(
        Costs(offload=1.0)
    )
    drawn = t.draw().splitlines()
    assert any(line.startswith("out ") and "O0" in line and "O1" in line for line in drawn)
    assert any(line.startswith("back ") and "L0" in line for line in drawn)
    assert "0OFFLOAD0: 1 to 2" in t.to_svg()
    assert "moves away" in t.to_svg()
    trace = json.loads(t.to_chrome_trace())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    assert {e["tid"] for e in trace if e.get("cat") == "RELOAD"} == {tracks["rank 0: reloads"]}


def test_what_was_not_computed_cannot_leave():
    s = read("0OFFLOAD0,0F0,0F1,0RELOAD0,0B0,0B1")
    with pytest.raises(ScheduleError, match="what is offloaded must have been computed before; got 0OFFLOAD0"):
        s.simulate(Costs(offload=20))
    with pytest.raises(ScheduleError, match="an action waits forever"):
        offloaded(read("0B0,0F0"), COSTS, memory_limit=1)
    with pytest.raises(ScheduleError, match="costs must be a Costs"):
        offloaded(make("1f1b", ranks=2, microbatches=2), None, memory_limit=1)
