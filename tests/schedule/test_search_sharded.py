"""Searches of sharded stages: plans are compared with their upkeep in place, and what is gathered takes memory."""

import itertools
import random
from dataclasses import replace

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Costs, Schedule, Upkeep


def orders(stages, microbatches):
    """Every order of F, I and W of some stages, microbatches in order; some of them wait forever."""

    def extend(done, counts):
        if len(done) == 3 * len(stages) * microbatches:
            yield tuple(done)
        for stage in stages:
            for op, before in (("F", None), ("I", "F"), ("W", "I")):
                number = counts[stage, op]
                if number < microbatches and (before is None or counts[stage, before] > number):
                    more = {**counts, (stage, op): number + 1}
                    yield from extend([*done, Action(stage, op, number)], more)

    return list(extend([], dict.fromkeys(itertools.product(stages, "FIW"), 0)))


def optimum(costs, placement, microbatches, limit):
    """The shortest period of all orders with all ways to gather within the limit; None if there is none."""
    best = None
    for rows in itertools.product(*(orders(held, microbatches) for held in placement)):
        plan = Schedule("order", microbatches, placement, rows)
        try:
            plan.simulate(costs)
        except ScheduleError:
            continue
        for counts in itertools.product(*(range(1, len(held) + 1) for held in placement)):
            timeline = schedule.sharded(plan, gathered=counts).simulate(costs)
            if timeline.peak_memory <= limit + 1e-9 and (best is None or timeline.period < best):
                best = timeline.period
    return best


@pytest.mark.parametrize(
    ("ranks", "microbatches", "stages_per_rank", "seeds"), [(1, 1, 2, 8), (2, 1, 2, 4), (2, 2, 1, 8), (1, 2, 1, 2)]
)
def test_tiny_searches_find_the_best_of_all_orders(ranks, microbatches, stages_per_rank, seeds):
    count, found = ranks * stages_per_rank, 0
    placement = schedule.search(
        Costs(), ranks=ranks, microbatches=1, memory_limit=9, stages_per_rank=stages_per_rank
    ).placement
    for seed in range(seeds):
        draw = random.Random(seed)

        def numbers(least, most, draw=draw):
            return [round(draw.uniform(least, most), 1) for _ in range(count)]

        costs = Costs(
            F=numbers(0.5, 2),
            I=numbers(0.5, 2),
            W=numbers(0.3, 2),
            comm=draw.choice([0.0, 0.3]),
            gather=numbers(0, 3),
            reduce=numbers(0, 3),
            memory_gathered=numbers(0, 2),
        )
        limit = draw.choice([3, 4, 5])
        arguments = {"ranks": ranks, "microbatches": microbatches, "memory_limit": limit}
        best = optimum(costs, placement, microbatches, limit)
        if best is None:
            with pytest.raises(ScheduleError, match="memory_limit must be large enough for one microbatch and 1 of"):
                schedule.search(costs, **arguments, stages_per_rank=stages_per_rank, sharded=True)
            continue
        plan = schedule.search(costs, **arguments, stages_per_rank=stages_per_rank, sharded=True)
        timeline = plan.check(memory_limit=limit, costs=costs).simulate(costs)
        assert timeline.period == pytest.approx(best), seed
        found += 1
    assert found > seeds // 2


def test_the_price_of_gathering_changes_which_schedule_is_best():
    def best(gather):
        costs = Costs(comm=0.4, gather=gather, reduce=gather)
        rows = schedule.compare(costs, ranks=4, microbatches=4, memory_limit=4, sharded=True).rows
        return next(row for row in rows if row.name in schedule.names())

    free, priced = best(0.0), best(6.0)
    assert (free.name, priced.name) == ("zb-h2", "interleaved-zb"), "half of a reduction hides behind another stage"
    assert Upkeep(0, "UNSHARD") in free.schedule.actions[0]
    plain = schedule.compare(Costs(comm=0.4), ranks=4, microbatches=4, memory_limit=4).rows
    assert next(row for row in plain if row.name in schedule.names()).period == pytest.approx(free.period)


def test_the_price_of_gathering_changes_the_order():
    costs = Costs(F=[1.0, 1.0], I=[1.0, 1.0], W=[1.0, 1.0], reduce=[0.0, 4.0])
    arguments = {"ranks": 1, "microbatches": 2, "stages_per_rank": 2, "memory_limit": 4}
    blind = schedule.sharded(schedule.search(costs, **arguments))
    seeing = schedule.search(costs, **arguments, sharded=True)
    assert seeing.simulate(costs).period == 12.0, "stage 1 is reduced while stage 0 computes"
    assert blind.simulate(costs).period > 12.0


def test_fewer_stages_are_gathered_where_memory_binds():
    costs = Costs(gather=1.0, reduce=1.0, memory_gathered=4.0)
    arguments = {"ranks": 2, "microbatches": 4, "stages_per_rank": 2, "sharded": True}
    ample, tight = (schedule.search(costs, **arguments, memory_limit=limit) for limit in (8, 4))
    assert all(gathers(steps) == 2 for steps in ample.actions), "each stage once"
    assert any(gathers(steps) > 2 for steps in tight.actions)
    assert tight.check(memory_limit=4, costs=costs).simulate(costs).period > ample.simulate(costs).period
    with pytest.raises(
        ScheduleError, match=r"and 1 of a rank.s stages gathered; got memory_limit=2.5. Fix: pass 3 or more"
    ):
        schedule.search(costs, **arguments, memory_limit=2.5)
    schedule.search(costs, **arguments, memory_limit=3)
    once = schedule.search(costs, **arguments, memory_limit=8, gathered=1)
    assert schedule.sharded(once, gathered=1) == once


def test_each_rank_keeps_as_many_gathered_as_it_has_room_for():
    costs = Costs(gather=1.0, reduce=1.0, memory_gathered=4.0)
    plan = schedule.search(
        costs, ranks=2, microbatches=4, stages_per_rank=2, sharded=True, memory_limit=[4.0, 8.0]
    ).check()
    assert gathers(plan.actions[0]) > 2
    assert gathers(plan.actions[1]) == 2
    assert all(peak <= most for peak, most in zip(plan.simulate(costs).peaks, (4.0, 8.0), strict=True))


def gathers(steps):
    return sum(isinstance(step, Upkeep) and step.op == "UNSHARD" for step in steps)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb", "looped-bfs", "zb-v", "v-min", "dualpipe-v"])
def test_more_gathered_stages_are_never_slower(name):
    for seed in range(4):
        draw = random.Random(seed)
        costs = Costs(
            F=[draw.uniform(0.5, 2) for _ in range(4)], gather=draw.uniform(0, 4), reduce=draw.uniform(0, 4), comm=0.1
        )
        plan = schedule.make(name, ranks=2, microbatches=4)
        few, all_of_them = (schedule.sharded(plan, gathered=count).simulate(costs) for count in (1, 2))
        assert all_of_them.period <= few.period + 1e-9
        assert all_of_them.makespan <= few.makespan + 1e-9


def test_memory_in_bytes_has_what_is_gathered():
    costs = Costs(gather=1.0, memory_gathered=3.0, activation_bytes=1e9, static_bytes=2e9)
    arguments = {"ranks": 2, "microbatches": 4, "sharded": True}
    small = schedule.search(costs, **arguments, memory="6GB")
    assert small.simulate(costs).peak_memory == 4.0
    assert costs.bytes_of(small.simulate(costs).peak_memory) == 6e9
    large = schedule.search(costs, **arguments, memory="7GB")
    assert large.simulate(costs).period < small.simulate(costs).period
    with pytest.raises(ScheduleError, match="large enough for one microbatch and 1 of"):
        schedule.search(costs, **arguments, memory="5GB")


def test_some_stages_are_sharded():
    costs = Costs(gather=[1.0, 1.0], reduce=2.0, memory_gathered=[5.0, 0.5])
    plan = schedule.search(costs, ranks=2, microbatches=2, memory_limit=2.5, sharded=[1]).check()
    assert gathers(plan.actions[0]) == 0
    assert gathers(plan.actions[1]) == 1
    assert plan.simulate(costs).peaks[1] <= 2.5


def test_recomputed_and_sharded():
    costs = Costs(gather=1.0, reduce=1.0, memory_gathered=1.0, memory_input=0.1)
    plan = schedule.search(costs, ranks=3, microbatches=6, memory_limit=2.2, sharded=True, recompute="auto").check()
    assert plan.recompute
    assert plan.simulate(costs).peak_memory <= 2.2
    limited = schedule.sharded(schedule.make("1f1b", ranks=3, microbatches=6)).simulate(costs)
    assert limited.peak_memory > 2.2


def test_candidates_of_sharded_stages_have_upkeep():
    costs = Costs(F=1.0, I=1.0, W=0.5, gather=2.0, reduce=2.0, memory_gathered=1.0)
    running = schedule.sharded(schedule.make("zb-v", ranks=2, microbatches=4))
    found = schedule.candidates(running, costs, memory_limit=4, count=5)
    assert all(gathers(steps) for plan in found for steps in plan.actions)
    periods = [plan.simulate(costs).period for plan in found]
    assert periods == sorted(periods)
    best = schedule.search(costs, ranks=2, microbatches=4, memory_limit=4, stages_per_rank=2, sharded=True)
    assert periods[0] <= best.simulate(costs).period + 1e-9

    def one_of_rank_0(plan, rank):  # as if that had less memory
        now, most = 0, 0
        for step in plan.actions[rank]:
            now += {"UNSHARD": 1, "RESHARD": -1}.get(step.op, 0) if isinstance(step, Upkeep) else 0
            most = max(most, now)
        return most <= (1 if rank == 0 else 2)

    fewer = schedule.candidates(running, costs, memory_limit=6, count=9, fits=one_of_rank_0)
    assert any(plan != running for plan in fewer)
    assert all(gathers(plan.actions[0]) > 2 and gathers(plan.actions[1]) == 2 for plan in fewer if plan != running)
    twice = schedule.candidates(running, costs, memory_limit=6, count=9, gathered=1)
    assert all(schedule.sharded(plan, gathered=1) == plan for plan in twice if plan != running)


def test_compared_schedules_fit_with_what_is_gathered():
    costs = Costs(gather=1.0, reduce=1.0, memory_gathered=2.0)
    found = schedule.compare(costs, ranks=2, microbatches=4, memory_limit=4, sharded=True)
    assert all(row.fits == (row.timeline.peak_memory <= 4) for row in found.rows)
    periods = [row.period for row in found.rows if row.fits]
    assert periods == sorted(periods)
    assert found.best.period == min(periods)
    gpipe = next(row for row in found.rows if row.name == "gpipe")
    assert not gpipe.fits, "four microbatches and what is gathered"
    assert gpipe.peak_memory == 6.0
    assert next(row for row in found.rows if row.name == "1f1b").fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharded": True, "offload": True}, "a search cannot both shard and offload stages"),
        ({"gathered": 1}, "gathered is for sharded stages; got gathered=1"),
        ({"sharded": True, "gathered": 0}, "gathered must be a number of stages from 1 on"),
        ({"sharded": [2]}, "sharded must be stages, numbers from 0 to 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        schedule.search(Costs(), ranks=2, microbatches=2, memory_limit=4, **arguments)


def test_gathered_of_each_rank():
    plan = schedule.make("zb-v", ranks=2, microbatches=4)
    made = schedule.sharded(plan, gathered=[1, 2]).check()
    assert made.actions[0] == schedule.sharded(plan, gathered=1).actions[0]
    assert made.actions[1] == schedule.sharded(plan, gathered=2).actions[1]
    assert replace(made, actions=plan.actions) == plan
    for wrong in ([1], [1, 0], "12", [1, 2, 3]):
        with pytest.raises(ScheduleError, match="gathered must be a number of stages from 1 on, or one for each rank"):
            schedule.sharded(plan, gathered=wrong)


def test_measured_steps_show_what_gathering_costs():
    truth = Costs(F=(1.0,) * 4, gather=(1.0, 2.0, 3.0, 4.0), reduce=(2.0, 1.0, 1.0, 3.0), comm=0.25)
    plan = schedule.sharded(schedule.make("zb-v", ranks=2, microbatches=4))
    found = schedule.measured_costs(plan.simulate(truth), Costs(gather=0.5))
    assert found.gather == pytest.approx(truth.gather), "one at a time on the link of a rank"
    assert found.reduce == pytest.approx(truth.reduce)


def test_what_no_rank_waited_for_changes_as_the_others_do():
    truth = Costs(F=(1.0,) * 2, gather=(3.0, 0.0))
    run = schedule.sharded(schedule.make("1f1b", ranks=2, microbatches=2)).simulate(truth)
    planned = Costs(gather=(1.0, 2.0), reduce=(5.0, 7.0))
    found = schedule.measured_costs(run, planned)
    assert found.gather == pytest.approx((3.0, 6.0)), "three times as long as planned"
    assert found.reduce == (5.0, 7.0), "nothing was seen"
    assert schedule.measured_costs(run, Costs()).gather == pytest.approx((3.0, 3.0)), "nothing was planned"


def test_the_limit_that_an_error_names_is_enough():
    costs = Costs(memory_gathered=1, gather=0.1, reduce=0.1)
    options = {"ranks": 2, "microbatches": 4, "stages_per_rank": 2, "sharded": True, "gathered": 2}
    with pytest.raises(
        ScheduleError, match=r"2 of a rank.s stages gathered; got memory_limit=1.9. Fix: pass 2 or more"
    ):
        schedule.search(costs, memory_limit=1.9, **options)
    plan = schedule.search(costs, memory_limit=2, **options)
    assert plan.simulate(costs).peak_memory <= 2
    with pytest.raises(ScheduleError, match="sharded must be True or False"):
        schedule.compare(costs, ranks=2, microbatches=4, memory_limit=4, sharded=[0])
