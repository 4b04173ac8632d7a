"""How "auto" changes its plan between steps: what decides, on times that are given; and that gradients stay right."""

from __future__ import annotations

import copy
import functools
import gc
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gloo import on_ranks
from searches import at_once, nothing_at_all, searches_at_once
from sternway import schedule
from sternway.errors import LostRankError, PipelineError
from sternway.pipeline import DistTransport, Pipeline, Profile, profile
from sternway.pipeline.build import _agree, _measure
from sternway.pipeline.build._partition import lay_out
from sternway.pipeline.build._rehearse import Rehearsal
from sternway.pipeline.forward._part import ModelPart
from sternway.pipeline.step import _runner
from sternway.pipeline.step._beside import beside
from sternway.pipeline.step._finder import Finder, Search
from sternway.pipeline.step._tuner import Tuner
from sternway.schedule import Costs, Schedule, Timeline, candidates, measured_costs

LIMIT = 8.0


def tuner_of(plan: Schedule, costs: Costs = Costs(), limit: float = LIMIT) -> Tuner:  # noqa: B008 - frozen
    return Tuner(plan, costs, limit, finder=Finder(begin=at_once))


def run(tuner: Tuner, truth: Costs, steps: int, slow: tuple[str, ...] = ()) -> list[Schedule]:
    """Run steps that cost what ``truth`` says; those of schedules with names in ``slow`` cost three times as much."""
    ran = []
    for _ in range(steps):
        plan = tuner.schedule
        factor = 3.0 if plan.name in slow else 1.0
        ran.append(plan)
        tuner.note((lambda plan=plan, factor=factor: measured(plan, truth, factor)) if tuner.looks else None)
    return ran


def measured(plan: Schedule, truth: Costs, factor: float = 1.0) -> Timeline:
    times = plan.simulate(truth).events
    return Timeline.measured(
        plan, [[(factor * event.start, factor * event.end) for event in rank] for rank in times], truth.memory_after_I
    )


def four(name: str = "1f1b") -> Schedule:
    return schedule.make(name, ranks=4, microbatches=8)


def test_the_costs_of_the_run_replace_those_of_the_plan() -> None:
    truth = Costs(F=(1.0, 2.0, 1.0, 1.0), I=(1.5,) * 4, W=(0.5,) * 4, comm=0.25, memory_after_I=0.9)
    tuner = tuner_of(four("zb-h1"), Costs(memory_after_I=0.9))
    run(tuner, truth, 5)
    assert pytest.approx(truth.F) == tuner.costs.F
    assert pytest.approx(truth.W) == tuner.costs.W
    assert tuner.costs.comm == pytest.approx(truth.comm)


def test_the_fastest_plan_is_kept_and_is_no_slower_than_any_named_one() -> None:
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)
    tuner = tuner_of(four())
    ran = run(tuner, truth, 90)
    assert len({plan.name for plan in ran}) > 2, "several plans were tried"
    assert ran[-1] == tuner.schedule
    kept = ran[-1].simulate(truth).span
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        plan = four(name).simulate(truth)
        assert plan.peak_memory > LIMIT or kept <= plan.span + 1e-9, name
    kept_plans = [plan for plan in tuner.plans if plan.kept]
    assert kept_plans[-1].schedule == tuner.schedule
    assert "kept" in str(kept_plans[-1])


def test_what_is_slow_in_truth_is_not_kept_whatever_was_planned() -> None:
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)
    tuner = tuner_of(four())
    run(tuner, truth, 90, slow=("search",))
    tried = {plan.schedule.name: plan for plan in tuner.plans}
    assert tried["search"].measured > 2 * tried["search"].planned
    assert not tried["search"].kept
    assert tuner.schedule.name != "search"


def test_once_stopped_it_keeps_the_best_plan_so_far() -> None:
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)
    tuner = tuner_of(four())
    run(tuner, truth, 9)
    tuner.stop()
    assert tuner.schedule == four(), "nothing was compared yet"
    tuner = tuner_of(four())
    run(tuner, truth, 100)
    tuner.stop()
    assert [plan.schedule for plan in tuner.plans if plan.kept][-1] == tuner.schedule


def test_only_plans_that_are_close_are_compared_for_long() -> None:
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)
    first = four("gpipe")
    tuner = tuner_of(first)
    ran = run(tuner, truth, 200)
    fastest = min(plan.measured for plan in tuner.plans)
    close = {plan.schedule for plan in tuner.plans if plan.measured <= 1.04 * fastest}
    slow = {plan.schedule for plan in tuner.plans} - close
    assert close
    assert slow - {first}
    start = tuner.plans[0].step
    for plan in slow - {first}:
        assert sum(other == plan for other in ran[start:]) == 2 * 3, "in two rounds"
    assert all(sum(other == plan for other in ran[start:]) >= 4 * 3 for plan in close)


def test_no_plan_is_tried_twice_for_one_cause() -> None:
    tuner = tuner_of(four())
    run(tuner, Costs(F=1.0, I=1.2, W=0.8, comm=0.2), 200)
    kept = [plan.schedule for plan in tuner.plans if plan.kept]
    lost = [plan.schedule for plan in tuner.plans if not plan.kept and plan.schedule not in kept]
    assert len(lost) == len(set(lost))


def test_noise_that_is_larger_than_the_difference_of_two_plans_does_not_decide() -> None:
    truth, numbers = Costs(F=1.0, I=1.2, W=0.8, comm=0.2), random.Random(0)
    tuner = tuner_of(four())
    for _ in range(300):
        plan, factor = tuner.schedule, 1.0 + 0.06 * numbers.random()
        tuner.note((lambda plan=plan, factor=factor: measured(plan, truth, factor)) if tuner.looks else None)
    best = candidates(four(), truth, memory_limit=LIMIT, count=1)[0].simulate(truth).period
    assert tuner.schedule.simulate(truth).period <= 1.02 * best


def test_a_plan_is_judged_by_what_a_step_takes_from_end_to_end() -> None:
    """The time between two steps counts: some orders may make a rank begin late that ends early."""
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)
    tuner = tuner_of(four())
    for _ in range(120):
        plan = tuner.schedule
        turn = 9.0 if plan.name == "search" else 0.5
        tuner.note((lambda plan=plan, turn=turn: replace(measured(plan, truth), turn=turn)) if tuner.looks else None)
    assert "search" in {plan.schedule.name for plan in tuner.plans}
    assert tuner.schedule.name != "search"


def test_between_two_looks_for_drift_no_times_are_wanted() -> None:
    tuner = tuner_of(four())
    run(tuner, Costs(), 200)
    wanted = []
    for _ in range(16):
        wanted.append(tuner.looks)
        run(tuner, Costs(), 1)
    assert sum(wanted) == 6, "three of eight, twice"


def test_no_plan_exceeds_the_limit() -> None:
    tuner = tuner_of(four(), limit=4.0)
    ran = run(tuner, Costs(F=1.0, I=1.2, W=0.8), 90)
    assert max(plan.simulate().peak_memory for plan in ran) <= 4.0


def test_sharded_stages_are_priced_as_measured() -> None:
    truth = Costs(F=(1.0,) * 4, I=(1.0,) * 4, W=(0.8,) * 4, comm=0.3, gather=(1.0,) * 4, reduce=(6.0,) * 4)
    first = schedule.sharded(schedule.make("zb-v", ranks=2, microbatches=4))
    tuner = tuner_of(first, Costs())
    ran = run(tuner, truth, 90)
    assert pytest.approx(truth.reduce) == tuner.costs.reduce
    assert all(plan.gathered == frozenset(range(4)) for plan in ran)
    best = candidates(first, truth, memory_limit=LIMIT, count=1)[0].simulate(truth)
    assert tuner.schedule.simulate(truth).period <= best.period + 1e-9
    assert best.period < first.simulate(truth).period


def slowed(stage: int, ranks: int, by: float = 1.3, comm: float = 0.0) -> Costs:
    times = [by if index == stage else 1.0 for index in range(ranks)]
    return Costs(F=times, I=times, W=times, comm=comm)


def test_a_stage_that_becomes_slow_makes_a_new_plan_within_twenty_steps() -> None:
    before, after = slowed(1, 3, by=1.0, comm=0.3), slowed(1, 3, comm=0.3)
    for more in (0, 3, 6):  # wherever it was between two looks
        tuner = tuner_of(schedule.make("1f1b", ranks=3, microbatches=4), limit=6.0)
        run(tuner, before, 70 + more)
        settled, story = tuner.schedule, len(tuner.plans)
        costs = measured_costs([measured(settled, after)] * 3, tuner.costs)
        fresh = candidates(settled, costs, memory_limit=6.0, count=1)[0]
        assert fresh != settled
        assert fresh in run(tuner, after, 20), "what a search for these costs finds"
        run(tuner, after, 50)
        assert "stage 1 takes 39.4% of the work, before 33.3%" in str(tuner.plans[story])
        best = schedule.search(after, ranks=3, microbatches=4, memory_limit=6.0).simulate(after).period
        assert tuner.schedule.simulate(after).period <= 1.05 * best
        assert tuner.schedule.simulate(after).period < settled.simulate(after).period


def test_what_no_other_plan_makes_faster_is_not_tried() -> None:
    before, after = (Costs(F=(1.0, f), I=(1.0, f), W=(1.0, f)) for f in (1.0, 1.3))
    tuner = tuner_of(schedule.make("1f1b", ranks=2, microbatches=4), limit=4.0)
    run(tuner, before, 70)
    settled, story = tuner.schedule, len(tuner.plans)
    assert set(run(tuner, after, 40)) == {settled}
    assert len(tuner.plans) == story
    assert pytest.approx(after.F) == tuner.costs.F, "but it is known what stages cost now"


class Slow:
    """Searches that are done when the test says so."""

    def __init__(self) -> None:
        self.begun: list[tuple[Search, Future[list[Schedule]]]] = []

    def __call__(self, search: Search) -> Future[list[Schedule]]:
        self.begun.append((search, Future()))
        return self.begun[-1][1]

    def finish(self) -> None:
        search, found = self.begun[-1]
        found.set_result(search())


def test_steps_go_on_until_the_search_of_the_first_rank_is_done_and_all_change_together() -> None:
    slow, said = Slow(), list[bytes]()

    def speak(message: bytes) -> Callable[[], bytes]:
        said.append(message)
        return lambda: message

    def listen(message: bytes) -> Callable[[], bytes]:
        assert message == b"", "it has nothing to say"
        return functools.partial(said.__getitem__, len(said) - 1)

    first = Tuner(four(), Costs(), LIMIT, finder=Finder(True, speak, slow))
    second = Tuner(four(), Costs(), LIMIT, finder=Finder(False, listen, slow))
    truth = Costs(F=1.0, I=1.2, W=0.8, comm=0.2)

    def both(steps: int) -> list[Schedule]:
        ran = []
        for _ in range(steps):
            ran += run(first, truth, 1)
            assert run(second, truth, 1) == ran[-1:]
        return ran

    assert set(both(40)) == {four()}, "it is not done"
    assert len(slow.begun) == 1, "one rank searches"
    slow.finish()
    assert len(set(both(60))) > 2
    assert [plan.schedule for plan in first.plans] == [plan.schedule for plan in second.plans]


def test_a_search_that_fails_leaves_the_plan_as_it_is() -> None:
    slow = Slow()
    tuner = Tuner(four(), Costs(), LIMIT, finder=Finder(begin=slow))
    run(tuner, Costs(), 10)
    slow.begun[0][1].set_exception(MemoryError("no room"))
    with pytest.warns(RuntimeWarning, match=r"the plan stays: the search .* failed with MemoryError\('no room'\)"):
        ran = run(tuner, Costs(), 40)
    assert set(ran) == {four()}
    assert tuner.plans == []


def test_once_stopped_it_does_not_search_on() -> None:
    slow = Slow()
    tuner = Tuner(four(), Costs(), LIMIT, finder=Finder(begin=slow))
    run(tuner, Costs(), 10)
    tuner.stop()
    assert slow.begun[0][1].cancelled()


def test_a_tuner_that_is_dropped_ends_its_search() -> None:
    slow = Slow()
    tuner = Tuner(four(), Costs(), LIMIT, finder=Finder(begin=slow))
    run(tuner, Costs(), 10)
    del tuner
    gc.collect()
    assert slow.begun[0][1].cancelled()


def test_a_call_beside_the_training_returns_or_raises_what_it_does_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert beside(functools.partial(int, "42")).result() == 42
    assert beside(functools.partial(print, "what is printed there does no harm")).result() is None
    with pytest.raises(ValueError, match="invalid literal"):
        beside(functools.partial(int, "x")).result()
    with pytest.raises(RuntimeError, match=f"its process was ended by signal {signal.SIGTERM.value}"):
        beside(functools.partial(signal.raise_signal, signal.SIGTERM)).result()  # here, it would end this process
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert beside(functools.partial(int, "8")).result() == 8, "in a thread, if there is no process"


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait; longer than any machine needs, if it comes to that."""
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_call_that_is_cancelled_ends_its_process(tmp_path: Path) -> None:
    found = beside(functools.partial(nothing_at_all, str(tmp_path)))
    wait_until(lambda: list(tmp_path.iterdir()))
    process = next(tmp_path.iterdir()).name
    assert Path("/proc", process).exists()
    assert found.cancel()
    wait_until(lambda: not Path("/proc", process).exists())
    with pytest.raises(CancelledError):
        found.result()


def test_steps_that_become_slower_as_a_whole_change_nothing() -> None:
    costs = Costs(F=(1.0,) * 4, I=(1.0,) * 4, W=(1.0,) * 4)
    twice = Costs(F=(2.0,) * 4, I=(2.0,) * 4, W=(2.0,) * 4)
    tuner = tuner_of(four())
    run(tuner, costs, 90)
    settled, story = tuner.schedule, len(tuner.plans)
    assert set(run(tuner, twice, 60)) == {settled}
    assert len(tuner.plans) == story


def test_searches_for_nothing_become_rare() -> None:
    tuner = tuner_of(four())
    noisy = [Costs(F=(1.0 + 0.5 * (i // 7 % 2), 1.0, 1.0, 1.0), I=(1.0,) * 4, W=(1.0,) * 4) for i in range(1400)]
    for truth in noisy:
        run(tuner, truth, 1)
    early = sum(plan.step < 700 for plan in tuner.plans)
    assert sum(plan.step >= 700 for plan in tuner.plans) < early


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))


def train(rank: int, sample: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(6)))
    alone = copy.deepcopy(model).eval()
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    with searches_at_once() as searches:
        pipe = Pipeline(
            model.eval(), schedule="auto", n_microbatches=4, loss_fn=F.mse_loss, sample=x[:4] if sample else None
        )
    F.mse_loss(alone(x), target).backward()
    reference = dict(alone.named_parameters())
    ran: list[Schedule] = []
    while (number := len(ran)) < 30 or (not pipe.plans and number < 160):  # close plans are compared for longer
        ran.append(pipe.schedule)
        assert sample or number < 4 or pipe.costs != Costs(), "the first batch is the sample"
        result = pipe.step(x, target=target, record=number > 0)
        if number == 0:
            assert result.timeline is None, "it was not asked for"
        else:
            assert result.timeline is not None
            assert result.timeline.schedule == ran[-1], "the schedule is that of the next step"
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad)
            parameter.grad = None
    assert bool(searches) == (rank == 0), "one rank searches"
    assert len({plan.actions for plan in ran}) > 1, "several orders were run"
    assert pipe.plans
    assert sum(plan.kept for plan in pipe.plans) >= 1
    orders = pipe.transport.crew().share([plan.actions for plan in ran])
    assert all(order == orders[0] for order in orders), "all ranks changed before the same steps"
    assert pipe.schedule.name in repr(pipe)
    pipe.stop_tuning()
    last = pipe.schedule
    for _ in range(3):
        pipe.step(x, target=target, record=False)
        assert pipe.schedule is last
    pipe.close()


@pytest.mark.parametrize("sample", [True, False])
def test_real_steps_have_the_gradients_of_one_process_in_every_order(sample: bool) -> None:
    on_ranks(2, train, sample)


def slow_down(rank: int) -> None:
    """Real steps of which it is told how long they took: after 130 of them, the second rank becomes slower by 30%."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(6))).eval()
    alone = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    F.mse_loss(alone(x), target).backward()
    reference = dict(alone.named_parameters())
    ran: list[Schedule] = []
    truth = slowed(1, 3, by=1.0, comm=0.3)

    def told(plan: Schedule, *_: Any) -> Callable[[], Timeline]:
        timeline = measured(plan, truth)
        return lambda: timeline

    with pytest.MonkeyPatch.context() as patch, searches_at_once():
        patch.setattr(_runner, "gather_timeline", told)
        pipe = Pipeline(model, schedule="auto", n_microbatches=4, loss_fn=F.mse_loss)
        for number in range(170):
            if number == 130:
                settled, costs, story = pipe.schedule, pipe.costs, len(pipe.plans)
                truth = slowed(1, 3, comm=0.3)
            ran.append(pipe.schedule)
            pipe.step(x, target=target)
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, reference[name].grad)
                parameter.grad = None
    costs = measured_costs([measured(settled, truth)] * 3, costs)
    fresh = candidates(settled, costs, memory_limit=6.0, count=1)[0]
    assert fresh != settled
    assert fresh in ran[130:150]
    assert "stage 1 takes" in pipe.plans[story].cause
    orders = pipe.transport.crew().share([plan.actions for plan in ran])
    assert all(order == orders[0] for order in orders), "all ranks changed before the same steps"
    pipe.close()


def test_a_rank_that_becomes_slow_makes_a_new_plan_on_all_ranks_at_once() -> None:
    on_ranks(3, slow_down)


def keep(rank: int) -> None:
    x = torch.randn(8, 8)
    options = {"n_microbatches": 4, "loss_fn": F.mse_loss}
    with pytest.raises(PipelineError, match=r'"auto" must know what stages cost.*; got no sample=, and tune=False'):
        Pipeline(nn.Sequential(block(), block()), schedule="auto", tune=False, **options)
    for pipe in (
        Pipeline(nn.Sequential(block(), block()), schedule="auto", tune=False, sample=x[:2], **options),
        Pipeline(nn.Sequential(block(), block()), schedule="zb-h1", **options),
    ):
        first = pipe.schedule
        for _ in range(12):
            pipe.step(x, target=x)
            assert pipe.schedule is first
        assert pipe.plans == ()
        pipe.close()


def test_a_schedule_that_was_named_stays() -> None:
    on_ranks(2, keep)


def rehearse(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(6)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, random = torch.randn(4, 8), torch.get_rng_state()
    first = {"sample": x, "sample_target": x} if rank == 0 else {}
    pipe = Pipeline(model, schedule="auto", n_microbatches=4, loss_fn=F.mse_loss, **first)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter in pipe.parameters():
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
    assert pipe.costs.comm > 0
    pipe.close()


def test_steps_with_the_sample_leave_the_model_as_it_was() -> None:
    on_ranks(2, rehearse)


def fail_in_the_sample(rank: int) -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        if rank == 1 or not output.shape[0] == 4:
            raise ValueError("no such loss")
        return F.mse_loss(output, target)

    x = torch.randn(4, 8)
    first = {"sample": x, "sample_target": x} if rank == 0 else {}
    with pytest.raises(PipelineError) as raised:
        Pipeline(nn.Sequential(block(), block(), block(), block()), n_microbatches=4, loss_fn=broken, **first)
    assert rank == 0 or "no such loss" in str(raised.value)


def test_a_loss_that_fails_on_one_rank_fails_on_all() -> None:
    on_ranks(2, fail_in_the_sample)


def copies(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    alone = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.randn(8, 8)

    def other(*args: Any, **kwargs: Any) -> Profile:
        """What each copy measures: to the first, W costs nothing; to the second, much."""
        found = profile(*args, **kwargs)
        return replace(found, W=tuple((rank // 2) * 10.0 * f for f in found.F), B=tuple(2 * f for f in found.F))

    with pytest.MonkeyPatch.context() as patch, searches_at_once() as searches:
        patch.setattr(_measure, "profile", other)
        pipe = Pipeline(
            model, schedule="auto", n_microbatches=4, loss_fn=F.mse_loss, sample=x[:1], sample_target=x[:1], mesh=mesh
        )
    half = slice(0, 4) if rank < 2 else slice(4, 8)
    ran = []
    for _ in range(60):  # enough for a second search
        ran.append(pipe.schedule.actions)
        pipe.step(x[half], target=target[half])
        F.mse_loss(alone(x), target).backward()
    reference = dict(alone.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad)
    orders = pipe.transport.crew_apart([0, 1, 2, 3]).share(ran)
    assert all(order == orders[0] for order in orders)
    assert len(set(ran)) > 1, "several orders were run"
    assert bool(searches) == (rank == 0), "one process of all copies searches"
    pipe.close()


def test_copies_take_the_plan_of_the_first() -> None:
    on_ranks(4, copies)


def leave(rank: int, directory: str, how: str) -> None:
    """Close a pipeline while its first rank searches, after a step that failed or once tuning has stopped."""
    x = torch.randn(8, 8)

    def forever(search: Search) -> Future[list[Schedule]]:
        return beside(functools.partial(nothing_at_all, directory))  # type: ignore[arg-type]  # it returns nothing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_agree, "Finder", functools.partial(Finder, begin=forever))
        pipe = Pipeline(nn.Sequential(block(), block()), schedule="auto", n_microbatches=4, loss_fn=F.mse_loss)
    for _ in range(10):
        pipe.step(x, target=x)
    if rank == 0:
        wait_until(lambda: list(Path(directory).iterdir()))
    if how == "fail":
        with pytest.raises(PipelineError if rank == 0 else LostRankError):
            pipe.step(x, target=x) if rank == 1 else pipe.step(x, x, target=x)
    elif how == "stop":
        pipe.stop_tuning()
    else:
        pipe.close()
    if rank == 0 and how != "fail":
        ended(directory)
    if how == "stop":
        for _ in range(3):
            pipe.step(x, target=x)
    pipe.close()
    if rank == 0:
        ended(directory)


def ended(directory: str) -> None:
    """Wait for the end of the process that a file in this folder names."""
    (process,) = (each.name for each in Path(directory).iterdir())
    wait_until(lambda: not Path("/proc", process).exists())


@pytest.mark.parametrize("how", ["close", "stop", "fail"])
def test_a_pipeline_that_is_left_ends_its_search(how: str, tmp_path: Path) -> None:
    on_ranks(2, leave, str(tmp_path), how)


def backwards(rank: int) -> None:
    """The last process is the first rank of the pipeline."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    alone = copy.deepcopy(model)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    F.mse_loss(alone(x), target).backward()
    reference = dict(alone.named_parameters())
    transport = DistTransport([2, 1, 0])
    with searches_at_once() as searches:
        pipe = Pipeline(
            model, schedule="auto", n_microbatches=4, loss_fn=F.mse_loss, sample=x[:2], sample_target=target[:2],
            transport=transport,
        )  # fmt: skip
    ran = []
    for _ in range(20):
        ran.append(pipe.schedule.actions)
        times = pipe.step(x, target=target).timeline
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, reference[name].grad)
            parameter.grad = None
        assert times is not None
    assert bool(searches) == (rank == 2), "the first rank of the pipeline searches"
    assert len(set(ran)) > 1, "several orders were run"
    crew = transport.crew()
    assert all(order == ran for order in crew.share(ran))
    here = 2 - rank
    assert (crew.rank, crew.leads, transport.rank) == (here, rank == 2, here)
    assert transport.gather([[float(here)]]) == [[0.0], [1.0], [2.0]]
    assert transport.gather_later(lambda: [[float(here)]])() == [[0.0], [1.0], [2.0]]
    assert transport.hear_later(b"%d" % here)() == b"0"
    assert crew.share(here) == [0, 1, 2]
    assert crew.gather(here) == ([0, 1, 2] if here == 0 else [])
    assert crew.scatter([10, 11, 12] if here == 0 else []) == 10 + here
    assert crew.from_first(lambda: here) == 0
    pipe.close()


def test_ranks_may_be_in_another_order_than_processes() -> None:
    on_ranks(3, backwards)


def rehearse_two_cuts(rank: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(2, 4)
    transport = DistTransport()
    transport.place([torch.device("cpu")])
    layout, rehearsal = lay_out(model, x, wanted=2), Rehearsal(transport, x, None, None)
    plan = schedule.make("1f1b", ranks=2, microbatches=2)
    for start in (1, 3):
        part = ModelPart(layout.cut(model, [0, start]), rank)
        assert rehearsal.span({rank: part}, plan, Costs(), LIMIT) > 0
    transport.close()


def test_ways_to_cut_with_equal_numbers_of_stages_are_tried_one_after_the_other() -> None:
    on_ranks(2, rehearse_two_cuts)
