"""Whole backwards: what they cost in a plan, and where I and W are joined into one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sternway.errors import ScheduleError
from sternway.schedule import Costs, fuse, lower_bound, make, names, search
from sternway.schedule.search._problem import place

APART = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
time = st.floats(0.1, 3.0)


def test_a_whole_backward_costs_what_it_is_said_to():
    plan = make("1f1b", ranks=2, microbatches=4)
    assert plan.simulate(Costs(F=1, I=1, W=1)).busy == (12.0, 12.0)
    assert plan.simulate(Costs(F=1, I=1, W=1, B=1.5)).busy == (10.0, 10.0)
    assert plan.simulate(Costs(F=[1, 1], I=[1, 1], W=[1, 1], B=[1.5, 1.0])).busy == (10.0, 8.0)
    assert make("zb-h1", ranks=2, microbatches=4).simulate(Costs(B=0.5)).busy == (12.0, 12.0)  # it has none


def test_two_stages_a_rank_share_it():
    assert Costs(B=1.0).per_stage(((0, 3), (1, 2))).B == (0.5,) * 4


@pytest.mark.parametrize(("b", "what"), [([1, 1, 1], "3 for B"), (-1.0, "B=-1.0"), ("1", "B='1'")])
def test_bad_costs(b, what):
    with pytest.raises(ScheduleError, match="cost") as caught:
        Costs(F=[1, 1], I=[1, 1], W=[1, 1], B=b)
    assert what in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(APART),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 8),
    costs=st.builds(Costs, F=time, I=time, W=time, B=time, comm=st.floats(0, 0.5), memory_after_I=st.floats(0, 1)),
)
def test_fusing_never_lengthens_a_step_and_holds_no_more(name, ranks, microbatches, costs):
    try:
        plan = make(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError:
        return  # not for these numbers
    fused = fuse(plan, costs).check()
    before, after = plan.simulate(costs), fused.simulate(costs)
    assert after.span <= before.span * (1 + 1e-6)
    assert all(mine <= other + 1e-9 for mine, other in zip(after.peaks, before.peaks, strict=True))
    assert max(after.busy) <= max(before.busy) * (1 + 1e-9)
    assert fuse(plan, costs) == fused
    if plan.placement == place(ranks, plan.stages_per_rank):
        limit = max(after.peak_memory, 1.0)
        numbers = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": plan.stages_per_rank}
        assert lower_bound(costs, memory_limit=limit, **numbers) <= after.span * (1 + 1e-9)


def test_nothing_is_joined_where_nothing_is_gained():
    plan = make("zb-h1", ranks=4, microbatches=8)
    assert fuse(plan, Costs()) is plan
    assert fuse(plan, Costs(B=2.5)) is plan


def test_where_a_whole_backward_is_much_cheaper_all_are():
    plan, costs = make("zb-h1", ranks=2, microbatches=8), Costs(F=1, I=1, W=1, B=0.5)
    fused = fuse(plan, costs)
    assert {action.op for rank in fused.actions for action in rank} == {"F", "B"}
    assert fused.name == "zb-h1-fused"


def test_where_the_next_rank_waits_they_stay_apart():
    """Four ranks and four microbatches: W fills what would be a bubble, so that a small gain is not worth joining."""
    plan, costs = make("zb-h1", ranks=4, microbatches=4), Costs(F=1, I=1, W=1, B=1.99)
    fused = fuse(plan, costs)
    assert "I" in {action.op for rank in fused.actions for action in rank}
    assert fused.simulate(costs).makespan < make("1f1b", ranks=4, microbatches=4).simulate(costs).makespan


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("b", [0.8, 1.5, 1.95])
def test_search_is_no_worse_than_any_name_fused_and_no_better_than_the_bound(stages_per_rank, b):
    costs = Costs(F=1.0, I=1.1, W=0.9, B=b, comm=0.05)
    numbers = {"ranks": 3, "microbatches": 7}
    found = search(costs, **numbers, memory_limit=6, stages_per_rank=stages_per_rank).check(memory_limit=6, costs=costs)
    span = found.simulate(costs).span
    for name in names():
        plan = make(name, **numbers)
        if plan.placement == found.placement and plan.simulate(costs).peak_memory <= 6:
            assert span <= fuse(plan, costs).simulate(costs).span * (1 + 1e-9), name
    bound = lower_bound(costs, **numbers, memory_limit=6, stages_per_rank=stages_per_rank)
    assert bound <= found.simulate(costs).span * (1 + 1e-9)


def test_many_pairs_are_tried_several_at_a_time():
    plan, costs = make("zb-h1", ranks=16, microbatches=64), Costs(B=1.5)
    fused = fuse(plan, costs).check()
    assert fused.simulate(costs).makespan < plan.simulate(costs).makespan


def test_rounding_is_no_gain():
    plan = make("zb-h2", ranks=2, microbatches=4)
    assert fuse(plan, Costs(F=0.1, I=0.1, W=0.2, B=0.3)) is plan  # 0.1 + 0.2 is a little more than 0.3


def test_where_joining_gains_little_no_rank_is_free_later():
    numbers = {"ranks": 4, "microbatches": 8, "memory_limit": 7}
    costs = Costs(F=1, I=1.1, W=0.9, B=1.99)
    apart = search(Costs(F=1, I=1.1, W=0.9), **numbers).simulate(costs)
    found = search(costs, **numbers).simulate(costs)
    assert (round(found.span, 6), round(found.makespan, 6)) <= (round(apart.span, 6), round(apart.makespan, 6))


def test_progress_goes_on_to_the_end():
    told = []
    search(
        Costs(B=1.5), ranks=2, microbatches=4, memory_limit=4, progress=lambda done, total: told.append(done / total)
    )
    assert len(told) > 5
    assert told == sorted(told)
    assert told[-1] == 1


def test_costs_are_needed():
    with pytest.raises(ScheduleError, match="costs must be a Costs; got None"):
        fuse(make("zb-h1", ranks=2, microbatches=2), None)


def test_a_schedule_is_needed():
    with pytest.raises(ScheduleError, match="fuse needs a Schedule; got int 3"):
        fuse(3, Costs())
