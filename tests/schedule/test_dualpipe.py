"""DualPipe: its formula, its two chains of stages against a plain simulation, and who refuses two copies of a model."""

from itertools import product

import pytest
from slow_checker import rendezvous

from sternway import schedule
from sternway.errors import PipelineError, ScheduleError
from sternway.schedule import Action, Costs, Schedule
from sternway.schedule.named import _dualpipe

SIZES = [(ranks, m) for ranks in (2, 4, 6, 8, 12) for m in (2 * ranks, 2 * ranks + 2, 4 * ranks)]
UNEVEN = Costs(F=1.0, I=1.5, W=0.7, comm=0.4, overlap=0.85)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_idle_time_and_memory_of_the_paper(ranks, microbatches):
    # Table 2 of 2412.19437, for F = I >= W and F&B >= B; a rank in the middle has the pairs that the formula counts.
    s = schedule.make("dualpipe", ranks=ranks, microbatches=microbatches)
    for w, overlap in product((0.25, 0.5, 0.9, 1.0), (1.0, 1.1, 0.9, 0.75, 2 / 3)):
        f, b = 1.0, 1.0 + w
        pair = overlap * (f + b)
        t = s.simulate(Costs(W=w, overlap=overlap))
        assert t.makespan - t.busy[ranks // 2] == pytest.approx((ranks / 2 - 1) * (pair + b - 3 * w))
        assert t.peaks == (ranks + 1,) * ranks


@pytest.mark.parametrize("overlap", [1.0, 0.8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_dualpipe_v_has_the_idle_time_of_dualpipe_on_twice_the_ranks(ranks, overlap):
    # The same stages, 2 p of them; a rank of p has two, and each costs half.
    w = 0.75
    t = schedule.make("dualpipe-v", ranks=ranks, microbatches=4 * ranks).simulate(Costs(W=w, overlap=overlap))
    pair, b = overlap * (2 + w), 1 + w
    assert t.makespan - t.busy[ranks - 1] == pytest.approx((ranks - 1) * (pair + b - 3 * w) / 2)


def plainly(s: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """When everything runs, by brute force: the two copies told apart by layer, not by stage."""
    p = s.ranks
    done: dict[tuple[str, bool, int, int], float] = {}  # op, copy, layer, microbatch
    queues, free = [list(steps) for steps in s.actions], [0.0] * p
    times: list[list[tuple[float, float]]] = [[] for _ in range(p)]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                start, took, made = free[rank], 0.0, []
                for action in queue[0].actions:
                    copy, layer, i = action.stage >= p, action.stage % p, action.microbatch
                    if action.op == "F":
                        needed, time = [("F", copy, layer - 1, i)] * (layer > 0), costs.F
                    elif action.op == "W":
                        needed, time = [("I", copy, layer, i)], costs.W
                    else:
                        needed = [("F", copy, layer, i)] + [("I", copy, layer + 1, i)] * (layer < p - 1)
                        time = costs.I + (costs.W if action.op == "B" else 0.0)
                    for key in needed:
                        home = p - 1 - key[2] if copy else key[2]
                        start = max(start, done.get(key, float("inf")) + costs.comm * (home != rank))
                    took += time
                    made.append(("I" if action.op == "B" else action.op, copy, layer, i))
                if start == float("inf"):
                    break
                took *= costs.overlap if len(made) == 2 else 1.0
                free[rank] = start + took
                done |= dict.fromkeys(made, free[rank])
                times[rank].append((start, free[rank]))
                queue.pop(0)
    return times


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 14), (6, 12), (8, 20)])
def test_as_a_plain_simulation(ranks, microbatches):
    s = schedule.make("dualpipe", ranks=ranks, microbatches=microbatches)
    assert s.check() is s
    t = s.simulate(UNEVEN)
    for events, expected in zip(t.events, plainly(s, UNEVEN), strict=True):
        assert [time for event in events for time in (event.start, event.end)] == pytest.approx(
            [time for both in expected for time in both]
        )
    assert max(t.busy) <= t.period + 1e-9 <= t.span + 2e-9
    assert sum(part.time for part in t.bottlenecks) == pytest.approx(t.makespan)


def test_its_two_halves_are_each_others_mirror():
    s = schedule.make("dualpipe", ranks=6, microbatches=16)
    assert s.placement == tuple((rank, 11 - rank) for rank in range(6))

    def exchanged(action: Action) -> Action:
        return Action((action.stage + 6) % 12, action.op, (action.microbatch + 8) % 16)

    for rank in range(3):
        mirror = [tuple(map(exchanged, step.actions)) for step in s.actions[rank]]
        assert mirror == [step.actions for step in s.actions[5 - rank]]


def test_files_drawings_and_passes():
    s = schedule.make("dualpipe", ranks=4, microbatches=8)
    assert schedule.from_json(s.to_json()) == s
    assert '"copies": 2' in s.to_json()
    for dialect in ("compute_only", "compute_comms"):
        assert schedule.from_csv(s.to_csv(dialect), name="dualpipe", copies=2) == s
    assert rendezvous(s.to_csv("compute_comms"), s.placement)
    with pytest.raises(ScheduleError, match="every stage must run every microbatch's F once"):
        schedule.from_csv(s.to_csv()).check()  # a file of torch's form does not say that there are two chains
    assert str(s).startswith("dualpipe: 4 ranks, 8 microbatches, 8 stages in 2 copies of the model\n")
    assert "SEND_F" not in "".join(cell for cell in s.to_csv("compute_comms").split(",") if cell.startswith("3"))
    drawing = schedule.make("dualpipe", ranks=2, microbatches=4).draw(width=104)
    for line in drawing.split("\n")[1:]:
        assert f"    {line}\n" in _dualpipe.__doc__
    costs = Costs(I=1.2, B=2.0, gather=0.5, reduce=0.5, offload=0.3, overlap=0.9)
    for other in (schedule.sharded(s), schedule.offloaded(s, costs, memory_limit=4), schedule.fuse(s, costs)):
        assert other.check().copies == 2
        assert other.simulate(costs).makespan > 0
        assert other.actions != s.actions


def test_a_microbatch_of_the_other_copy():
    rows = (("0F0", "3F1", "0B0", "3B1"), ("1F0", "2F1", "1B0", "2B1"))
    text = "\n".join(",".join(row) for row in rows)
    schedule.from_csv(text, copies=2).check()
    with pytest.raises(ScheduleError, match=r"2 copies .* its own microbatches; got 3F0 \(rank 0, step 1\)"):
        schedule.from_csv(text.replace("3F1", "3F0"), copies=2).check()
    with pytest.raises(ScheduleError, match=r"every stage must .* got no 3B1 \(rank 0, 3 steps\)"):
        schedule.from_csv(text.replace(",3B1", ""), copies=2).check()
    with pytest.raises(ScheduleError, match=r"a deadlock: 3F1 \(rank 0, step 0\) waits for 2F1"):
        schedule.from_csv("3F1,0F0,0B0,3B1\n1F0,2F1,1B0,2B1", copies=2).check()


@pytest.mark.parametrize(("ranks", "microbatches"), [(3, 8), (4, 9), (4, 6), (1, 2)])
def test_numbers_that_it_does_not_take(ranks, microbatches):
    with pytest.raises(ScheduleError, match=f"even number .* got {ranks} ranks, {microbatches} mic.* Fix: use dualpi"):
        schedule.make("dualpipe", ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize(("microbatches", "copies"), [(3, 2), (2, 0), (2, "2"), (4, 4), (2, True)])
def test_copies_that_cannot_be(microbatches, copies):
    actions = tuple(tuple(Action(stage, op, 0) for op in "FB") for stage in range(2))
    with pytest.raises(ScheduleError, match="copies must be a number from 1 on that divides both"):
        Schedule("mine", microbatches, ((0,), (1,)), actions, copies=copies)


def test_it_is_named_apart_and_pipelines_refuse_it():
    from torch import nn

    from sternway import pipeline

    assert schedule.names(copies=2) == ("dualpipe",)
    assert "dualpipe" not in schedule.names()
    made = schedule.make("dualpipe", ranks=2, microbatches=4)
    refusal = 'one copy of the model; got schedule dualpipe, of 2 copies. Fix: pass schedule="dualpipe-v"'
    for wanted in ("dualpipe", made):
        with pytest.raises(PipelineError, match=refusal):
            pipeline.Pipeline(nn.Sequential(nn.Linear(2, 2)), schedule=wanted, n_microbatches=4, ranks=2)
    with pytest.raises(PipelineError, match=refusal):
        pipeline.fit(nn.Linear(2, 2), None, ranks=2, n_microbatches=4, schedule="dualpipe")


@pytest.mark.parametrize("copies", [0, 99, "2", None, 1.5])
def test_wrong_numbers_of_copies(copies):
    text = schedule.make("dualpipe", ranks=4, microbatches=8).to_csv("compute_comms")
    with pytest.raises(ScheduleError, match="copies must be a number from 1 on"):
        schedule.from_csv(text, copies=copies)


def test_there_are_no_other_plans_for_two_copies():
    with pytest.raises(ScheduleError, match="one copy of the model; got dualpipe, of 2 copies"):
        schedule.candidates(schedule.make("dualpipe", ranks=2, microbatches=4), Costs(), memory_limit=4, count=3)


def test_measured_times_of_a_stage_whose_backwards_are_all_overlapped():
    text = "0F0,1F2,(0F1;0B0)OVERLAP_F_B,(1F3;0B1)OVERLAP_F_B,1B2,1B3"
    s = schedule.from_csv(text, copies=2).check()
    with pytest.raises(ScheduleError, match="a backward of every stage that is not overlapped; got none of stage 0"):
        schedule.measured_costs(s.simulate(), Costs())
