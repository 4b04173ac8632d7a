"""Each rule of check, broken once: what the message says, and where."""

import re

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Costs, Overlap, Schedule

TWO = ((0,), (1,))


def plan(*rows: str, placement=TWO, microbatches=1) -> Schedule:
    actions = tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)
    return Schedule("mine", microbatches, placement, actions)


def rejected(s: Schedule, message: str, **options) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        s.check(**options)


def test_a_good_one_is_returned():
    s = plan("0F0 0B0", "1F0 1I0 1W0")
    assert s.check() is s


def test_placed():
    rejected(
        plan("0F0 0B0 1F0", "1I0 1W0"),
        "a rank must run only stages that it holds; got 1F0 (rank 0, step 2), which holds 0. "
        "Fix: move 1F0 to rank 1, or change the placement",
    )
    rejected(
        plan("0F0 0B0 0F1", "1F0 1B0"),
        "a microbatch must be 0 to 0; got 0F1 (rank 0, step 2). Fix: remove it",
    )
    rejected(plan("0F0 0B0 2F0", "1F0 1B0"), "a stage must be 0 to 1; got 2F0 (rank 0, step 2). Fix: remove it")


def test_complete():
    rule = "every stage must run every microbatch's F once, and once either B or both I and W; got "
    rejected(plan("0F0 0B0", ""), rule + "no 1F0 (rank 1, 0 steps). Fix: add 1F0 to rank 1")
    rejected(
        plan("0F0", "1F0 1B0"),
        rule + "no 0B0 (rank 0, 1 steps), though it runs 0F0 (step 0). Fix: add 0B0 to rank 0, or both its I",
    )
    rejected(
        plan("0F0 0B0", "1F0 1I0"),
        rule + "no 1W0 (rank 1, 2 steps) after 1I0 (step 1). Fix: add 1W0 to rank 1",
    )


def test_once():
    rejected(
        plan("0F0 0F0 0B0", "1F0 1B0"),
        "an action must run once; got 0F0 again (rank 0, step 1), after step 0. Fix: remove one of them",
    )
    rule = "a backward must run once: whole as B, or split as I and W; got "
    rejected(
        plan("0F0 0B0 0I0 0W0", "1F0 1B0"),
        rule + "0I0 (rank 0, step 2) beside 0B0 (step 1). Fix: keep 0B0, or 0I0",
    )
    rejected(plan("0F0 0I0 0W0 0B0", "1F0 1B0"), rule + "0B0 (rank 0, step 3) beside 0I0 (step 1). Fix: keep 0B0")
    rejected(plan("0F0 0B0 0W0", "1F0 1B0"), rule + "0W0 (rank 0, step 2) beside 0B0. Fix: remove 0W0")


def test_ordered():
    rejected(
        plan("0B0 0F0", "1F0 1B0"),
        "a stage must run F before I or B of the same microbatch; got 0B0 (rank 0, step 0) with 0F0 at step 1. "
        "Fix: move 0F0 before it",
    )
    rejected(
        plan("0F0 0B0", "1F0 1W0 1I0"),
        "a stage must run I before W of the same microbatch; got 1W0 (rank 1, step 1) with 1I0 at step 2. "
        "Fix: move 1I0 before it, or use 1B0 alone",
    )
    rejected(plan("0B0", "1F0 1B0"), "got 0B0 (rank 0, step 0) with 0F0 nowhere. Fix: add 0F0 before it")
    both = Schedule("mine", 1, ((0,),), ((Overlap(Action(0, "F", 0), Action(0, "B", 0)),),))
    rejected(both, "got 0B0 (rank 0, step 0) with 0F0 in the same step. Fix: move 0F0 before it")


def test_a_circle_across_ranks_is_told_in_full():
    s = plan("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", microbatches=2)
    rejected(
        s,
        "ranks cannot wait for each other in a circle; got a deadlock: 0B0 (rank 0, step 1) waits for 1B0 "
        "(rank 1, step 2); 1F1 (rank 1, step 1) waits for 0F1 (rank 0, step 2). "
        "Fix: on rank 1, run 1B0 before 1F1 or on rank 0, run 0F1 before 0B0",
    )


def test_a_circle_within_a_rank():
    s = plan("1F0 0F0 1B0 0B0", placement=((0, 1),))
    rejected(
        s,
        "a deadlock: 1F0 (rank 0, step 0) waits for 0F0 (rank 0, step 1). Fix: on rank 0, run 0F0 before 1F0",
    )


def test_a_circle_of_overlapped_pairs():
    pair = Overlap(Action(0, "F", 1), Action(0, "B", 0))
    rows = (
        (Action(0, "F", 0), pair, Action(0, "B", 1)),
        tuple(map(Action.parse, ["1F0", "1F1", "1B0", "1B1"])),
    )
    rejected(Schedule("mine", 2, TWO, rows), "(0F1;0B0)OVERLAP_F_B (rank 0, step 1) waits for 1B0 (rank 1, step 2)")


def test_memory():
    s = schedule.make("zb-h1", ranks=4, microbatches=8)
    assert s.check(memory_limit=4) is s
    rejected(
        s,
        "a rank must keep at most 3.5 microbatches' activations; got 4 at 0F3 (rank 0, step 3). Fix: run",
        memory_limit=3.5,
    )


def test_memory_counts_what_i_leaves():
    s = schedule.make("zb-h1", ranks=4, microbatches=8)
    last = Schedule(s.name, 8, ((0,),), (tuple(Action(0, a.op, a.microbatch) for a in s.actions[3]),))
    assert last.check(memory_limit=4) is last
    rejected(last, "a rank must keep at most 3 ", memory_limit=3)
    assert last.check(memory_limit=3, costs=Costs(memory_after_I=0.5)) is last


def test_thirds_do_not_add_up_to_more_than_the_whole():
    s = schedule.make("looped-bfs", ranks=1, microbatches=11, stages_per_rank=3)
    assert s.check(memory_limit=11) is s


@pytest.mark.parametrize("edit", ["unknown stage", "stuck"])
def test_simulate_sends_to_check_what_it_cannot_time(edit):
    s = plan("0F0 0B0", "1F0 2F0") if edit == "unknown stage" else plan("0B0 0F0", "1F0 1B0")
    with pytest.raises(ScheduleError, match=r"call check\(\)"):
        s.simulate()
