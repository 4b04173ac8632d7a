"""Messages from one rank to another follow each other: ``Costs.comm_busy``."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import invented, named

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs, Schedule, Timeline, _between, measured_costs
from sternway.schedule._depends import KIND, needs
from sternway.schedule._depends import run as in_order

NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")


def starts_of(plan: Schedule, costs: Costs) -> dict[str, float]:
    return {str(event.action): event.start for rank in plan.simulate(costs).events for event in rank}


@pytest.mark.parametrize(("busy", "forwards"), [(0.0, [4, 5, 6, 7]), (0.5, [4, 5.5, 7, 8.5]), (1.0, [4, 7, 10, 13])])
def test_each_message_waits_for_the_one_before(busy: float, forwards: list[float]) -> None:
    """
    sent at   1   2   3   4        each takes 3, so with comm_busy=1 the second arrives at 1 + 3 + 3
    """
    plan = schedule.make("gpipe", ranks=2, microbatches=4)
    starts = starts_of(plan, Costs(F=1, I=0.5, W=0.5, comm=3, comm_busy=busy))
    assert [starts[f"1F{i}"] for i in range(4)] == forwards


def test_the_other_direction_is_a_way_of_its_own() -> None:
    plan = schedule.make("zb-h1", ranks=2, microbatches=4)
    costs = Costs(F=1, I=1, W=1, comm=1, comm_busy=1)  # one message each way in three
    assert plan.simulate(costs).period == pytest.approx(plan.simulate(Costs(F=1, I=1, W=1, comm=1)).period)


def slow_starts(plan: Schedule, costs: Costs) -> dict[str, float]:
    """Again and again from what is known so far, until nothing changes: no order, no tables of who needs what."""
    times = costs.per_stage(plan.placement)
    rank_of, sources = plan.stage_ranks(), needs(plan.num_stages)
    ends: dict[tuple[int, int], float] = {}
    starts: dict[str, float] = {}
    arrived: dict[tuple[int, int, int], float] = {}
    while True:
        before = dict(starts), dict(arrived)
        for rank, steps in enumerate(plan.actions):
            free = 0.0
            for step in steps:
                wanted = [
                    (3 * a.stage + KIND[a.op], a.microbatch, source)
                    for a in step.actions
                    for source in sources[3 * a.stage + KIND[a.op]]
                ]
                when = [
                    arrived.get((source, i, rank)) if rank_of[source // 3] != rank else ends.get((source, i))
                    for _, i, source in wanted
                ]
                if any(each is None for each in when):
                    break
                starts[str(step)] = max([free, *(each for each in when if each is not None)])
                free = starts[str(step)] + times.time(step)
                ends |= {(3 * a.stage + KIND[a.op], a.microbatch): free for a in step.actions}
            wires: dict[int, float] = {}
            for step in steps:
                for a in step.actions:
                    made, i = 3 * a.stage + KIND[a.op], a.microbatch
                    if (made, i) not in ends:
                        break
                    other = a.stage + (1 if a.op == "F" else -1)
                    if a.op != "W" and 0 <= other < plan.num_stages and rank_of[other] != rank:
                        to = rank_of[other]
                        begin = max(ends[made, i], wires.get(to, 0.0))
                        wires[to] = begin + costs.comm_busy * times.comm[rank][to]
                        arrived[made, i, to] = begin + times.comm[rank][to]
        if (starts, arrived) == before:
            return starts


@settings(max_examples=60, deadline=None)
@given(plan=st.one_of(invented(), named()), comm=st.floats(0, 4), busy=st.floats(0, 1))
def test_any_schedule_runs_as_told(plan: Schedule, comm: float, busy: float) -> None:
    costs = Costs(F=1, I=1.2, W=0.7, comm=comm, comm_busy=busy)
    assert starts_of(plan, costs) == pytest.approx(slow_starts(plan, costs))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_long_as_its_messages_keep_a_way_busy(name: str) -> None:
    plan = schedule.make(name, ranks=2, microbatches=6)
    there = len(plan.placement[0])  # messages of a microbatch from one rank to the other: some looped ones have more
    costs = Costs(F=0.1, I=0.1, W=0.1, comm=2, comm_busy=1)
    assert plan.simulate(costs).period >= 6 * there * 2 - 1e-9
    assert plan.simulate(costs).period >= plan.simulate(Costs(F=0.1, I=0.1, W=0.1, comm=2)).period


@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("comm", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_measured_steps_show_it(name: str, ranks: int, comm: float, busy: float) -> None:
    """Where messages follow each other closely. Where they do not, it makes no difference."""
    plan = schedule.make(name, ranks=ranks, microbatches=8)
    truth = Costs(F=1, I=1.1, W=0.9, comm=comm, comm_busy=busy)
    run = plan.simulate(truth)
    found = measured_costs([run, run], Costs())
    assert plan.simulate(found).makespan == pytest.approx(run.makespan, rel=0.01)
    if run.makespan > 1.05 * plan.simulate(Costs(F=1, I=1.1, W=0.9, comm=comm)).makespan:
        assert found.comm_busy == pytest.approx(busy, abs=0.26)


def test_where_nothing_tells_it_stays_as_planned() -> None:
    run = schedule.make("1f1b", ranks=2, microbatches=4).simulate(Costs(comm=0.1, comm_busy=0.75))
    assert measured_costs(run, Costs(comm_busy=0.5)).comm_busy == 0.5


def test_it_is_found_in_some_of_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training waits for that: 16 ranks with 128 microbatches took most of a second."""
    plan = schedule.make("zb-v", ranks=16, microbatches=128)
    run = plan.simulate(Costs(comm=2, comm_busy=1))
    steps, messages = [], []
    starts, departures = _between._starts, _between._departures
    monkeypatch.setattr(_between, "_starts", lambda each: steps.append(each) or starts(each))
    monkeypatch.setattr(_between, "_departures", lambda run, *rest: messages.append(len(run)) or departures(run, *rest))
    found = measured_costs([run] * 4, Costs())
    assert found.comm_busy == pytest.approx(1, abs=0.26)
    assert plan.simulate(found).makespan == pytest.approx(run.makespan, rel=0.01)
    assert len(steps) == 2
    assert sum(messages) < 10 * 2 * (2 * 30 * 128), "of two steps with so many messages each"


def test_what_waits_on_a_full_way_is_no_overhead() -> None:
    """Each message takes a little longer than planned, and those behind it come later by all of that."""
    plan, numbers = schedule.make("looped-bfs", ranks=8, microbatches=64), random.Random(0)
    ends: dict[int, tuple[int, float]] = {}
    wires: dict[tuple[int, int], float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in range(plan.ranks)]
    for rank, inputs, outputs in in_order(plan):
        start = times[rank][-1][1] if times[rank] else 0.0
        for key in inputs:
            maker, there = ends[key]
            if maker != rank:
                there = max(there, wires.get((maker, rank), 0.0)) + 1.5 * (1 + abs(numbers.gauss(0, 0.1)))
                wires[maker, rank] = there
            start = max(start, there)
        times[rank].append((start, start + len(outputs) * 0.5))
        ends |= dict.fromkeys(outputs, (rank, times[rank][-1][1]))
    measured = Timeline.measured(plan, times)
    found = measured_costs([measured, measured], Costs())
    assert found.overhead < 0.05
    assert plan.simulate(found).makespan == pytest.approx(measured.makespan, rel=0.06)


@pytest.mark.parametrize(("ranks", "microbatches", "i", "w"), [(4, 8, 1.14, 1.41), (3, 6, 1.17, 1.41), (2, 8, 1, 1)])
@pytest.mark.parametrize("per_rank", [1, 2])
def test_a_search_counts_it(per_rank: int, ranks: int, microbatches: int, i: float, w: float) -> None:
    """It plans as if each message had a way of its own; ZB-H2 was better over one way, in two of these cases."""
    costs = Costs(F=1, I=i, W=w, comm=2, comm_busy=1)
    options = {"ranks": ranks, "microbatches": microbatches, "memory_limit": microbatches}
    found = schedule.search(costs, **options, stages_per_rank=per_rank)
    time = found.simulate(costs)
    assert time.peak_memory <= microbatches
    assert schedule.lower_bound(costs, **options, stages_per_rank=per_rank) <= time.span + 1e-9
    for name in schedule.names():
        named = schedule.make(name, ranks=ranks, microbatches=microbatches)
        if named.placement == found.placement and (other := named.simulate(costs)).peak_memory <= microbatches:
            assert time.span <= other.span + 1e-9, name


def test_a_share_is_from_0_to_1() -> None:
    with pytest.raises(ScheduleError, match=r"share of comm.*got comm_busy=1\.5"):
        Costs(comm_busy=1.5)
    with pytest.raises(ScheduleError, match="finite and not negative"):
        Costs(comm_busy=-0.1)
