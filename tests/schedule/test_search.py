"""The search against the paper's numbers, against every named schedule, and against its own promises."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sternway.schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs, lower_bound, make, names, search
from sternway.schedule.search._clock import clock
from sternway.schedule.search._hunt import named_words
from sternway.schedule.search._improve import improve
from sternway.schedule.search._list_schedule import Priorities, list_schedule, refill
from sternway.schedule.search._pattern import patterns, repeat
from sternway.schedule.search._problem import Problem, pose, resolve
from sternway.schedule.search._words import peaks, to_schedule, to_words

ROWS = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())["rows"]


def case_of(row):
    costs = Costs(**{name: row[name] for name in ("F", "I", "W", "comm", "memory_after_I")})
    return costs, {"ranks": row["ranks"], "microbatches": row["microbatches"]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['microbatches']}")
@pytest.mark.parametrize(("name", "times"), [("zb-1p", 1), ("zb-2p", 2)])
def test_search_is_never_worse_than_the_paper(row, name, times):
    costs, numbers = case_of(row)
    limit = times * row["ranks"]
    timeline = search(costs, **numbers, memory_limit=limit).check().simulate(costs)
    assert round(timeline.bubble_rate, 4) <= row["bubble_rate"][name]
    assert timeline.peak_memory <= limit + 1e-9
    assert lower_bound(costs, **numbers, memory_limit=limit) <= timeline.span * (1 + 1e-9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_the_bound_proves_the_papers_schedules_at_one_p_optimal(row):
    costs, numbers = case_of(row)
    bound = lower_bound(costs, **numbers, memory_limit=row["ranks"])
    work = row["microbatches"] * (row["F"] + row["I"] + row["W"])
    assert round(1 - work / bound, 4) == row["bubble_rate"]["zb-1p"]


def test_next_to_nothing_left_after_i():
    costs = Costs(memory_after_I=2.2e-313)
    assert lower_bound(costs, ranks=2, microbatches=2, memory_limit=2) == lower_bound(
        Costs(memory_after_I=0.0), ranks=2, microbatches=2, memory_limit=2
    )
    search(costs, ranks=2, microbatches=2, memory_limit=2).check(memory_limit=2, costs=costs)


def test_two_stages_a_rank_have_no_bubble_in_the_memory_of_1f1b():
    costs = Costs(F=1.0, I=1.0, W=1.0)
    timeline = search(costs, ranks=4, microbatches=8, memory_limit=4, stages_per_rank=2).simulate(costs)
    assert timeline.bubble_rate == pytest.approx(0, abs=1e-9)
    assert timeline.peak_memory <= 4 + 1e-9


def random_costs(draw, stages):
    return Costs(
        F=[draw.uniform(0.5, 2) for _ in range(stages)],
        I=[draw.uniform(0.5, 2) for _ in range(stages)],
        W=[draw.uniform(0.2, 2) for _ in range(stages)],
        comm=draw.uniform(0, 0.3),
        memory_after_I=draw.random(),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_unequal_stages_are_no_worse_than_any_named_schedule_in_the_same_places(seed, stages_per_rank):
    draw = random.Random(seed)
    ranks, microbatches = draw.randint(2, 4), draw.randint(3, 9)
    costs = random_costs(draw, ranks * stages_per_rank)
    for limit in (ranks / 2 + 0.5, ranks, 2 * ranks, float("inf")):
        numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
        timeline = search(costs, **numbers, memory_limit=limit).check().simulate(costs)
        assert timeline.peak_memory <= limit + 1e-9
        assert timeline.span >= lower_bound(costs, **numbers, memory_limit=limit) * (1 - 1e-9)
        for name in names():
            try:
                other = make(name, **numbers)
            except ScheduleError:
                continue
            named = other.simulate(costs)
            if other.placement == timeline.schedule.placement and named.peak_memory <= limit:
                assert timeline.span <= named.span * (1 + 1e-9), name


def test_unequal_stages_are_better_than_every_named_schedule_where_that_can_be():
    costs = Costs(F=[1.0, 1.0, 2.0, 1.5], I=[1.0, 1.5, 2.0, 1.0], W=[0.5, 1.0, 1.5, 0.5], comm=0.1)
    timelines = [make(name, ranks=4, microbatches=8).simulate(costs) for name in ("1f1b", "zb-h1", "zb-h2")]
    limit = 5
    best = min(timeline.span for timeline in timelines if timeline.peak_memory <= limit)
    assert search(costs, ranks=4, microbatches=8, memory_limit=limit).simulate(costs).span < best


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_numbers_give_a_whole_schedule_within_the_limit_and_not_below_the_bound(data):
    ranks = data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(1, 6))
    stages_per_rank = data.draw(st.integers(1, 3))
    time = st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5])
    per_stage = st.lists(time, min_size=ranks * stages_per_rank, max_size=ranks * stages_per_rank)
    costs = Costs(
        F=data.draw(time | per_stage),
        I=data.draw(time | per_stage),
        W=data.draw(time | per_stage),
        comm=data.draw(time),
        memory_after_I=data.draw(st.sampled_from([0.0, 0.3664, 1.0, 1.5])),
    )
    limit = data.draw(st.sampled_from([1.5, 1.75, 2.0, 3.2, 100.0]))
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    found = search(costs, **numbers, memory_limit=limit).check()
    assert Counter(Counter(step.op for line in found.actions for step in line).values()) == {
        ranks * stages_per_rank * microbatches: 3
    }
    timeline = found.simulate(costs)
    assert timeline.peak_memory <= limit + 1e-9
    assert timeline.span >= lower_bound(costs, **numbers, memory_limit=limit) * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3, 4])
def test_the_smallest_limit_works(stages_per_rank):
    # F leaves room for the rank's later stages, so that whatever has got furthest can always go on. Suppose
    # all wait, and the furthest microbatch waits for room at slot j of v on a rank that has room for n steps:
    # then more than n - (v - j) are taken. The last F before it, at slot k, left v - k - 1 free, so k >= j:
    # a microbatch has got further than the furthest.
    numbers = {"ranks": 3, "microbatches": 5, "stages_per_rank": stages_per_rank, "memory_limit": 1}
    timeline = search(Costs(), **numbers).check().simulate()
    assert timeline.peak_memory <= 1 + 1e-9


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_the_same_call_gives_the_same_schedule(stages_per_rank):
    costs = Costs(F=1.0, I=1.1, W=0.7, comm=0.05, memory_after_I=0.4)
    numbers = {"ranks": 4, "microbatches": 12, "memory_limit": 3, "stages_per_rank": stages_per_rank}
    assert search(costs, **numbers) == search(costs, **numbers)


def test_the_unit_of_time_does_not_matter():
    numbers = {"ranks": 4, "microbatches": 12, "memory_limit": 5}
    seconds = search(Costs(F=2e-9, I=2e-9, W=1e-9), **numbers)
    assert seconds.actions == search(Costs(F=2.0, I=2.0, W=1.0), **numbers).actions


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"memory_limit": 0.5}, r"large enough for one microbatch; got memory_limit=0.5. Fix: pass 1 or more$"),
        ({"memory_limit": float("nan")}, r"large enough for one microbatch; got memory_limit=nan"),
        ({"memory_limit": "8"}, r"memory_limit must be a number of microbatches; got '8'"),
        ({"ranks": 0}, r"ranks must be an int, 1 or more; got ranks=0"),
        ({"microbatches": 2.0}, r"microbatches must be an int, 1 or more; got microbatches=2.0"),
        (
            {"stages_per_rank": True},
            r"stages_per_rank must be an int, 1 or more; got stages_per_rank=True",
        ),
    ],
)
@pytest.mark.parametrize("ask", [search, lower_bound])
def test_what_cannot_be_says_what_can(ask, numbers, message):
    with pytest.raises(ScheduleError, match=message):
        ask(Costs(), **{"ranks": 2, "microbatches": 4, "memory_limit": 2} | numbers)


@pytest.mark.parametrize(("left", "limit"), [(1.5, 1.2), (3, 2), (3, 4), (3, 8), (14, 5)])
@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_where_i_leaves_more_than_f_kept_whole_backwards_are_looked_at(left, limit, stages_per_rank):
    costs, numbers = Costs(memory_after_I=left), {"ranks": 4, "microbatches": 8}
    found = search(costs, **numbers, memory_limit=limit, stages_per_rank=stages_per_rank).check()
    timeline = found.simulate(costs)
    assert timeline.peak_memory <= limit
    assert timeline.span >= lower_bound(costs, **numbers, memory_limit=limit, stages_per_rank=stages_per_rank)
    for name in names():
        named = make(name, **numbers)
        run = named.simulate(costs)
        if named.placement == found.placement and run.peak_memory <= limit:
            assert timeline.span <= run.span, name


def test_a_limit_below_what_f_keeps_says_so():
    with pytest.raises(ScheduleError, match=r"got memory_limit=0.9. Fix: pass 1 or more$"):
        search(Costs(memory_after_I=1.5), ranks=2, microbatches=4, memory_limit=0.9)


def test_per_stage_costs_are_one_for_each_stage():
    with pytest.raises(ScheduleError, match="one number for each of the 4 stages; got 2 for F"):
        search(Costs(F=[1.0, 2.0]), ranks=2, microbatches=4, memory_limit=2, stages_per_rank=2)


def test_progress_goes_up_to_the_end():
    told = []
    numbers = {"ranks": 4, "microbatches": 8, "memory_limit": 3}
    search(Costs(W=0.5), **numbers, progress=lambda done, total: told.append((done, total)))
    dones, totals = zip(*told, strict=True)
    assert list(dones) == sorted(dones)
    assert set(totals) == {dones[-1]}


def test_the_names_of_the_search_are_public():
    assert {"Comparison", "Row", "compare", "lower_bound", "search"} <= set(sternway.schedule.__all__)
    for stages_per_rank, name in ((1, "search"), (2, "search-v"), (3, "search-looped")):
        found = search(Costs(), ranks=1, microbatches=1, memory_limit=1, stages_per_rank=stages_per_rank)
        assert found.name == name
    assert (
        search(Costs(), ranks=2, microbatches=1, memory_limit=1, stages_per_rank=2, looped=True).name == "search-looped"
    )


@pytest.mark.parametrize("limit", [4, 8])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_two_looped_stages_of_each_rank_are_no_worse_than_any_named_schedule_of_them(limit, weight):
    costs = Costs(F=0.5, I=1.0 - weight, W=weight, B=1.0, comm=0.05)
    numbers = {"ranks": 4, "microbatches": 8, "memory_limit": limit, "stages_per_rank": 2}
    found = search(costs, **numbers, looped=True)
    assert found.placement == ((0, 4), (1, 5), (2, 6), (3, 7))
    found.check()
    times = found.simulate(costs)
    assert times.peak_memory <= limit
    assert times.span >= lower_bound(costs, **numbers, looped=True) - 1e-9
    for name in ("interleaved-1f1b", "interleaved-zb", "looped-bfs"):
        other = make(name, ranks=4, microbatches=8).simulate(costs)
        assert other.peak_memory > limit or times.span <= other.span + 1e-9
    if weight == 0.0:
        assert times.span <= search(costs, **numbers).simulate(costs).span + 1e-9, "no W fills the gaps of a V"


# What the search is made of.


def uneven_problem(stages_per_rank: int, memory_limit: float = 3) -> tuple[Costs, Problem]:
    costs = random_costs(random.Random(stages_per_rank), 4 * stages_per_rank)
    numbers = {"ranks": 4, "microbatches": 7, "memory_limit": memory_limit}
    return costs, pose(costs, **numbers, stages_per_rank=stages_per_rank)


@pytest.mark.parametrize("name", names())
def test_the_search_times_plans_as_simulate_does(name):
    found = make(name, ranks=4, microbatches=8)
    costs = random_costs(random.Random(1), found.num_stages)
    problem = resolve(costs, found.placement, 8, 100.0)
    words = to_words(found)
    timeline = to_schedule(problem, words, name).check().simulate(costs)
    times = clock(problem, words)
    assert times.score.span == pytest.approx(timeline.span)
    assert times.score.makespan == pytest.approx(timeline.makespan)
    assert max(peaks(problem, words)) == pytest.approx(timeline.peak_memory)
    assert times.score.span <= found.simulate(costs).span * (1 + 1e-9)


def test_plans_in_which_ranks_wait_for_each_other_have_no_times():
    problem = pose(Costs(), ranks=2, microbatches=1, memory_limit=1)
    assert clock(problem, [[1, 0, 2], [3, 4, 5]]) is None


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_every_family_keeps_to_the_limit_and_can_be_refilled(stages_per_rank):
    _, problem = uneven_problem(stages_per_rank)
    plans = [list_schedule(problem, Priorities((2, 9, 1, 3), 0.5, forward_first=True))]
    plans += [repeat(problem, pattern) for pattern in patterns(problem, 5)]
    plans += [words for words in named_words(problem) if max(peaks(problem, words)) <= 3]
    assert len(plans) > 2
    for words in plans:
        to_schedule(problem, words, "plan").check()
        assert max(peaks(problem, words)) <= 3 + 1e-9
        for patience in (0.0, 1.0):
            refilled = refill(problem, words, patience)
            assert refilled is not None
            to_schedule(problem, refilled, "refilled").check()
            assert max(peaks(problem, refilled)) <= 3 + 1e-9
            assert [[s for s in word if s % 3 != 2] for word in refilled] == [
                [s for s in word if s % 3 != 2] for word in words
            ]


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_moves_on_the_critical_path_mend_a_poor_plan(stages_per_rank):
    _, problem = uneven_problem(stages_per_rank)
    words = list_schedule(problem, Priorities((1, 1, 1, 1), 1.0, forward_first=False))
    times = clock(problem, words)
    mended, after = improve(problem, words, times, goal=0.0, tries=300)
    assert after.score < times.score
    assert max(peaks(problem, mended)) <= 3 + 1e-9
    to_schedule(problem, mended, "mended").check()
    assert improve(problem, words, times, goal=times.score.span, tries=300) == (words, times)


def test_three_stages_that_are_recomputed_are_no_worse_than_a_name():
    """Named schedules were made with two stages of each rank, and so never of those that have three."""
    costs, again = Costs(F=0.5, I=1.0, W=0.5), tuple(range(6))
    found = search(costs, ranks=2, microbatches=2, memory_limit=5, stages_per_rank=3, recompute=again)
    plan = replace(make("interleaved-zb", ranks=2, microbatches=2, stages_per_rank=3), recompute=again)
    assert found.simulate(costs).span <= plan.simulate(costs).span + 1e-9
    others = sternway.schedule.candidates(plan, costs, memory_limit=5, count=9)
    assert {"interleaved-1f1b", "looped-bfs"} <= {other.name for other in others}


def test_candidates_of_stages_that_no_search_would_place_so():
    running = sternway.schedule.from_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1")
    costs = Costs(F=(1.0, 2.0, 1.0), I=(1.0, 2.0, 1.0), W=(1.0, 1.0, 1.0))
    assert sternway.schedule.candidates(running, costs, memory_limit=9, count=3) == [running]
