"""Stages that keep their inputs alone and run their forward again: what that costs, keeps, and how it is chosen."""

import json
from dataclasses import replace

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs, compare, from_json, lower_bound, make, search
from sternway.schedule.search._problem import pose

COSTS = Costs(F=1.0, I=1.2, W=0.8, memory_after_I=0.9, memory_input=0.1)


def recomputed(name, *stages, ranks=2, microbatches=4):
    return replace(make(name, ranks=ranks, microbatches=microbatches), recompute=stages)


def test_a_forward_more_in_the_backward_and_less_memory():
    s = recomputed("gpipe", 0, ranks=1, microbatches=2)
    t = s.simulate(COSTS)
    assert [(str(e.action), e.start, e.end) for e in t.events[0]] == [
        ("0F0", 0.0, 1.0),
        ("0F1", 1.0, 2.0),
        ("0B0", 2.0, 5.0),
        ("0B1", 5.0, 8.0),
    ]
    assert t.peak_memory == pytest.approx(1.1)  # the input of one, and all of the other while its backward runs
    assert t.memory == (((0.0, 0.1), (1.0, 0.2), (2.0, 1.1), (5.0, 1.0), (8.0, 0.0)),)
    assert t.period == 8.0
    assert replace(s, recompute=()).simulate(COSTS).peak_memory == 2.0
    assert s.simulate(replace(COSTS, memory_again=0.5)).peak_memory == pytest.approx(0.6)


def test_what_waits_for_w_may_be_more_than_f_kept():
    t = recomputed("zb-h1", 0, ranks=1, microbatches=1).simulate(replace(COSTS, memory_again=0.2))
    assert t.memory == (((0.0, 0.1), (1.0, 0.2), (3.2, 0.9), (4.0, 0.0)),)
    assert t.peak_memory == 0.9
    with pytest.raises(ScheduleError, match=r"at most 0.5 microbatches.*; got 0.9 at 0I0 \(rank 0, step 1\)"):
        t.schedule.check(memory_limit=0.5, costs=t.costs)


def test_only_the_stages_that_are_named():
    costs = Costs(F=(1.0, 2.0), I=(1.0, 1.0), W=(1.0, 1.0), B=(1.5, 1.5), memory_input=(0.0, 0.25))
    each = costs.per_stage(((0,), (1,)), recompute=(1,))
    assert (each.I, each.B, each.keeps, each.works) == ((1.0, 3.0), (1.5, 3.5), (1.0, 0.25), (0.0, 0.75))
    assert each.keeps_after_i == (1.0, 1.0)


def test_some_blocks_keep_and_take_so_much_less():
    """Half of a stage that keeps 1, or 0.2 recomputed: 0.6, and half of its forward again."""
    costs = Costs(F=1.0, I=1.2, W=0.8, memory_input=0.2, memory_again=0.5, blocks=4)
    each = costs.per_stage(((0,), (1,)), recompute=((0, 0.5), 1))
    assert each.keeps == (0.6, 0.2)
    assert pytest.approx((1.7, 2.2)) == each.I
    assert pytest.approx((2.5, 3.0)) == each.B
    assert pytest.approx((0.3, 0.3)) == each.works  # one block at a time comes back, of a half or of all
    whole = replace(costs, memory_again=None).per_stage(((0,), (1,)), recompute=((0, 0.5), 1))
    assert pytest.approx((0.4, 0.8)) == whole.works  # where all that is recomputed comes back at once


def test_as_few_blocks_as_fit():
    costs = Costs(F=(1.0, 3.0), I=(1.0, 3.0), W=(1.0, 3.0), blocks=(4, 4))
    most = replace(make("1f1b", ranks=2, microbatches=4), recompute=(0, 1))
    found = schedule.recomputed(most, costs, memory_limit=1.5)
    assert found.recompute == ((0, 0.5),)
    assert found.simulate(costs).peak_memory == 1.5
    assert schedule.recomputed(most, replace(costs, blocks=1), memory_limit=1.5).recompute == (0,)
    assert schedule.recomputed(most, costs, memory_limit=[0.5, 9.0]).recompute == (0,)  # which does not fit either


def test_a_search_recomputes_some_blocks_if_that_is_enough():
    for blocks, expected in ((1, (0,)), (4, ((0, 0.5),))):
        costs = Costs(F=1.0, I=1.2, W=0.8, blocks=blocks)
        numbers = {"ranks": 2, "microbatches": 6, "memory_limit": [1.5, 2.0]}
        found = search(costs, **numbers, recompute="auto")
        assert found.recompute == expected
        least = lower_bound(costs, **numbers, recompute="auto")
        assert least <= found.simulate(costs).span * (1 + 1e-9)
    none = search(replace(costs, blocks=(0, 4)), **numbers, recompute="auto")
    assert 0 not in none.shares


def test_many_stages_that_recompute_different_shares():
    whole = Costs(F=1.0, I=1.2, W=0.8, B=1.9, comm=0.05, memory_after_I=0.9, memory_input=0.1, memory_again=0.4)
    half = replace(whole, blocks=2)
    numbers = {"ranks": 8, "microbatches": 16, "memory_limit": 1.6, "recompute": "auto"}
    found = search(half, **numbers).check(memory_limit=1.6, costs=half)
    assert len(set(found.shares.values())) > 1
    assert found.simulate(half).span < 0.97 * search(whole, **numbers).simulate(whole).span


def test_backwards_are_split_where_i_leaves_less_than_f_kept():
    """A quarter of the blocks: what W waits for is less than F kept, so ranks may fill idle time with it."""
    numbers = {"ranks": 2, "microbatches": 4, "memory_limit": 2.0, "recompute": ((0, 0.25),)}
    assert pose(Costs(memory_after_I=0.7), **numbers).whole == ()
    assert pose(Costs(memory_after_I=0.8), **numbers).whole == (0,)


def test_bad_blocks():
    for bad in (-1, 1.5, True, "2", [1, -1]):
        with pytest.raises(ScheduleError, match="blocks must be whole numbers from 0 on"):
            Costs(blocks=bad)
    with pytest.raises(ScheduleError, match="blocks must have one number for each of the 2 stages; got 3"):
        Costs(blocks=(1, 2, 3)).levels(2)


def test_measured_costs_are_those_of_a_stage_that_is_not_recomputed():
    costs = Costs(F=(1.0, 2.0), I=(1.5, 1.0), W=(0.5, 1.0), B=(1.75, 1.75), comm=0.25, memory_input=0.1)
    for name in ("zb-h1", "1f1b"):
        for much in (1, (1, 0.25)):
            found = schedule.measured_costs(recomputed(name, much).simulate(costs), costs)
            assert found.F == (1.0, 2.0)
            assert pytest.approx((1.5, 1.0)) == found.I
            assert pytest.approx((1.75, 1.75)) == found.B
            assert found.memory_input == 0.1


@pytest.mark.parametrize(("stages_per_rank", "limit"), [(1, 4.0), (1, 1.6), (2, 2.0), (2, 1.1)])
def test_the_search_recomputes_where_memory_is_short(stages_per_rank, limit):
    ranks = 4 // stages_per_rank
    numbers = {"ranks": ranks, "microbatches": 5, "stages_per_rank": stages_per_rank, "memory_limit": limit}
    found = search(COSTS, **numbers, recompute="auto")
    t = found.check(memory_limit=limit, costs=COSTS).simulate(COSTS)
    assert bool(found.recompute) == (limit < 2)
    for recompute in ((), (0, 1, 2, 3)):
        assert t.span <= search(COSTS, **numbers, recompute=recompute).simulate(COSTS).span * (1 + 1e-9)
        for name in set(schedule.names()) - {"dualpipe-v"}:  # which needs more microbatches
            named = make(name, ranks=ranks, microbatches=5)
            if named.placement == found.placement:
                other = replace(named, recompute=recompute).simulate(COSTS)
                assert other.peak_memory > limit + 1e-9 or other.span >= t.span * (1 - 1e-9), name
    for recompute in (found.recompute, "auto"):
        assert t.span >= lower_bound(COSTS, **numbers, recompute=recompute) * (1 - 1e-9)


def test_ranks_may_have_limits_of_their_own():
    limits = [1.2, 3.0]
    found = search(COSTS, ranks=2, microbatches=6, memory_limit=limits, recompute="auto")
    t = found.check().simulate(COSTS)
    assert all(peak <= limit + 1e-9 for peak, limit in zip(t.peaks, limits, strict=True))
    assert found.recompute == (0,)
    assert found.check(memory_limit=limits, costs=COSTS) is found
    with pytest.raises(ScheduleError, match=r"a rank must keep at most 1.1 .* \(rank 0, step"):
        found.check(memory_limit=[1.1, 3.0], costs=COSTS)
    with pytest.raises(ScheduleError, match="a number of microbatches, or one for each rank; got list"):
        found.check(memory_limit=[3.0], costs=COSTS)
    with pytest.raises(ScheduleError, match=r"got memory_limit=0.5 of rank 1. Fix: pass 1 or more"):
        search(COSTS, ranks=2, microbatches=2, memory_limit=[2.0, 0.5])
    with pytest.raises(ScheduleError, match="memory_limit must be a number of microbatches"):
        search(COSTS, ranks=2, microbatches=2, memory_limit=[2.0])


def test_nothing_fits_whatever_is_recomputed():
    with pytest.raises(ScheduleError, match=r"large enough for one microbatch; got memory_limit=0\.9"):
        search(COSTS, ranks=2, microbatches=2, memory_limit=0.9, recompute="auto")
    small = replace(COSTS, memory_again=0.4)
    found = search(small, ranks=2, microbatches=2, memory_limit=0.9, recompute="auto")
    assert found.recompute == (0, 1)
    assert found.simulate(small).peak_memory <= 0.9


def test_many_stages_recompute_alike():
    found = search(COSTS, ranks=9, microbatches=9, memory_limit=2.2, recompute="auto")
    assert found.check(memory_limit=2.2, costs=COSTS).recompute


def test_bad_stages():
    for bad in ([4], [-1], ["0"], 0, "auto!", [True], [(0, 0.0)], [(0, 1.5)], [(0, True)], [(0, 0.5, 1)]):
        with pytest.raises(ScheduleError, match=r"recompute must be stages, numbers from 0 to \d, or"):
            search(COSTS, ranks=2, microbatches=2, memory_limit=2, recompute=bad)
    with pytest.raises(ScheduleError, match="recompute must be stages, numbers from 0 to 1, or"):
        recomputed("1f1b", 2)


def test_files_and_drawings_show_it():
    s = recomputed("1f1b", 1, 0, 1, microbatches=2)
    assert s.recompute == (0, 1)
    assert from_json(s.to_json()) == s
    assert '"recompute": [0, 1]' in s.to_json()
    half = replace(s, recompute=[(1, 0.5), 0, (1, 0.25)])
    assert half.recompute == (0, (1, 0.5))
    assert from_json(half.to_json()) == half
    assert '"recompute": [0, [1, 0.5]]' in half.to_json()
    assert str(half).startswith("1f1b: 2 ranks, 2 microbatches, 2 stages; recomputed: 0, 50% of 1\n")
    assert "recompute" not in replace(s, recompute=()).to_json()
    with pytest.raises(ScheduleError, match="recompute must be a list of stages; got str '01'"):
        from_json(s.to_json().replace('[0, 1],\n "act', '"01",\n "act'))
    assert str(s).startswith("1f1b: 2 ranks, 2 microbatches, 2 stages; recomputed: 0, 1\n")
    t = s.simulate(COSTS)
    assert "B0r---" in t.draw()
    assert "1B0, forward again: 2 to 5" in t.to_svg()
    assert "bar at the top: forward again" in t.to_svg()
    slices = {e["name"]: e["args"] for e in json.loads(t.to_chrome_trace())["traceEvents"] if e["ph"] == "X"}
    assert slices["0B1"]["forward_again"]
    assert not slices["0F1"]["forward_again"]


def test_a_comparison_has_each_schedule_recomputed_too():
    numbers = {"ranks": 2, "microbatches": 4, "memory_limit": 1.1}
    plain, both = (compare(COSTS, **numbers, recompute=again) for again in (False, True))
    names = [row.name for row in both.rows]
    assert {"1f1b", "1f1b, recomputed", "search", "search-v"} <= set(names)
    assert len([row.name for row in plain.rows if "recomputed" in row.name]) == 0
    assert both.best.timeline.span < plain.best.timeline.span
    assert all(row.gap >= 0 for row in both.rows if row.fits)
    assert "(stages recomputed: " in both.verdict


def test_stages_that_keep_nothing():
    assert schedule.search(Costs(), ranks=4, microbatches=12, memory_limit=2, recompute=[3]).recompute == (3,)
    best = schedule.compare(Costs(), ranks=4, microbatches=12, memory_limit=1, recompute=True).rows[0]
    assert best.fits
    nothing = Costs(memory_after_F=0, memory_after_I=0)
    assert schedule.search(nothing, ranks=2, microbatches=4, memory_limit=1).simulate(nothing).peak_memory == 0


@pytest.mark.parametrize("recompute", [(), "auto"])
def test_a_whole_backward_needs_no_memory_for_what_i_leaves(recompute):
    costs = Costs(I=(0.8, 0.4), W=0.4, B=0.9, memory_after_I=1.4, memory_input=0.1)
    plan = make("interleaved-1f1b", ranks=1, microbatches=2).check(memory_limit=1.0, costs=costs)
    least = lower_bound(costs, ranks=1, microbatches=2, memory_limit=1.0, stages_per_rank=2, recompute=recompute)
    assert least <= plan.simulate(costs).span * (1 + 1e-9)
