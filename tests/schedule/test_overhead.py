"""What each action takes a rank besides computing: simulated, and seen in measured steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sternway import schedule
from sternway.schedule import Action, Costs, Schedule, Timeline

TRUTH = Costs(F=1.0, I=1.2, W=0.8, comm=0.3, overhead=0.1)


def taken(plan: Schedule, action: Action, truth: Costs) -> float:
    """What its rank takes to receive what an action needs from another rank."""
    source = action.stage + (-1 if action.op == "F" else 1)
    away = action.op != "W" and 0 <= source < plan.num_stages and plan.rank_of(source) != plan.rank_of(action.stage)
    return truth.receive if away else 0.0


def as_measured(plan: Schedule, truth: Costs) -> Timeline:
    """A step whose clock starts when an action begins to compute, after its overhead."""
    times = [
        [(event.start + truth.overhead + taken(plan, event.action, truth), event.end) for event in rank]
        for rank in plan.simulate(truth).events
    ]
    return Timeline.measured(plan, times, truth.memory_after_I)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_every_action_takes_longer(name):
    plan = schedule.make(name, ranks=2, microbatches=4)
    share = 1 / len(plan.placement[0])
    longer = {op: [getattr(TRUTH, op) * share + 0.1] * plan.num_stages for op in "FIW"}
    b = [(TRUTH.I + TRUTH.W) * share + 0.1] * plan.num_stages
    expected = plan.simulate(Costs(**longer, B=b, comm=0.3))
    found = plan.simulate(TRUTH)
    assert found.makespan == pytest.approx(expected.makespan)
    assert found.period == pytest.approx(expected.period)


def test_more_stages_of_a_rank_have_more_of_it():
    costs = Costs(overhead=0.5)
    one, two = (schedule.make(name, ranks=4, microbatches=8).simulate(costs) for name in ("zb-h1", "zb-v"))
    plain = [schedule.make(name, ranks=4, microbatches=8).simulate().period for name in ("zb-h1", "zb-v")]
    assert plain[1] < plain[0]
    assert one.period < two.period


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_what_was_measured_is_what_was_true(name):
    plan = schedule.make(name, ranks=4, microbatches=8)
    run = as_measured(plan, TRUTH)
    found = schedule.measured_costs(run, Costs(I=1.2, W=0.8))
    assert found.overhead == pytest.approx(0.1)
    assert found.comm == pytest.approx(0.3)
    assert list(found.F) == pytest.approx([1.0 / len(plan.placement[0])] * plan.num_stages)
    assert plan.simulate(found).period == pytest.approx(plan.simulate(TRUTH).period)


@pytest.mark.parametrize("overhead", [0.0, 0.01])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_to_take_a_message_is_more_than_to_begin(name, overhead):
    """Most actions of a V need none. The median of all gaps was theirs, and what messages take was cut off."""
    plan = schedule.make(name, ranks=2, microbatches=8)
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.05, overhead=overhead, receive=0.15)
    found = schedule.measured_costs(as_measured(plan, truth), Costs(I=1.2, W=0.8))
    assert plan.simulate(found).period == pytest.approx(plan.simulate(truth).period, rel=0.01)
    if name != "gpipe":  # there, every action needs a message but on the first stage forwards
        assert found.overhead + found.receive == pytest.approx(overhead + 0.15)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "dualpipe"])
def test_who_has_the_stage_before_takes_no_message(name):
    plan = schedule.make(name, ranks=4, microbatches=8)
    plain, costs = Costs(F=1.0, I=1.2, W=0.8), Costs(F=1.0, I=1.2, W=0.8, receive=0.25)
    times = {
        str(e.action): e.end - e.start
        for rank in plan.simulate(plain).events
        for e in rank
        if len(e.action.actions) == 1
    }
    chain = plan.num_stages // plan.copies
    for rank in plan.simulate(costs).events:
        for event in rank:
            if isinstance(event.action, Action):
                source = event.action.stage + (-1 if event.action.op == "F" else 1)
                same_copy = source // chain == event.action.stage // chain
                more = taken(plan, event.action, costs) if same_copy else 0.0
                assert event.end - event.start == pytest.approx(times[str(event.action)] + more)


def test_none_was_measured_where_there_is_none():
    plan = schedule.make("zb-h1", ranks=4, microbatches=8)
    assert schedule.measured_costs(as_measured(plan, replace(TRUTH, overhead=0.0)), Costs()).overhead == 0.0


def test_the_page_of_a_plan_shows_it(tmp_path):
    schedule.make("1f1b", ranks=2, microbatches=2).simulate(TRUTH).to_html(tmp_path / "plan.html")
    assert "overhead = 0.1" in (tmp_path / "plan.html").read_text()


def test_waiting_for_upkeep_is_none_of_it():
    plan = schedule.sharded(schedule.make("1f1b", ranks=2, microbatches=4))
    run = plan.simulate(Costs(gather=5.0, reduce=1.0))
    assert schedule.measured_costs(run, Costs()).overhead == 0.0


@pytest.mark.parametrize("memory_limit", [2, 4])
def test_a_search_joins_i_and_w_where_one_action_has_less_of_it(memory_limit):
    costs = Costs(F=1.0, I=1.0, W=1.0, overhead=0.5)
    numbers = {"ranks": 4, "microbatches": 8, "memory_limit": memory_limit}
    apart = schedule.search(replace(costs, overhead=0.0), **numbers)
    found = schedule.search(costs, **numbers)
    assert found.simulate(costs).span < apart.simulate(costs).span
    assert any(step.op == "B" for steps in found.actions for step in steps)


def test_a_search_is_no_worse_than_a_name_with_whole_backwards():
    costs = Costs(F=0.0, I=2.78, W=0.82, overhead=0.05)
    found = schedule.search(costs, ranks=1, microbatches=4, memory_limit=1, stages_per_rank=3)
    named = schedule.make("interleaved-1f1b", ranks=1, microbatches=4, stages_per_rank=3)
    assert found.simulate(costs).span <= named.simulate(costs).span
