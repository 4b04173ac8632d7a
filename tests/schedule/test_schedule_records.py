"""Action, Overlap, Costs and Schedule: frozen, printed, parsed, and strict about what they take."""

import dataclasses

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Action, Costs, Overlap, Schedule

PAIR = Overlap(Action(0, "F", 3), Action(7, "B", 1))


def test_actions_print_parse_and_sort():
    assert [str(Action(2, op, 10)) for op in "FIWB"] == ["2F10", "2I10", "2W10", "2B10"]
    assert Action.parse("12F0") == Action(stage=12, op="F", microbatch=0)
    assert sorted([Action(1, "F", 0), Action(0, "W", 2), Action(0, "F", 9)])[0] == Action(0, "F", 9)
    assert [Action(0, op, 0).is_backward for op in "FIWB"] == [False, True, False, True]


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "1FOO", "2F0junk", " 2F0", "2f0", "0BW0", "02F0", "2F-1", "²F0"]
)
def test_only_actions_parse_as_actions(text):
    with pytest.raises(
        ScheduleError, match=r"an action must be written as stage, op, microbatch; got .* Fix: write \[stage\]"
    ):
        Action.parse(text)


def test_actions_are_of_the_four_ops_and_count_from_zero():
    with pytest.raises(ScheduleError, match="an action's op must be F, I, W or B; got 'X'"):
        Action(0, "X", 0)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="must be 0 or more; got -1F0"):
        Action(-1, "F", 0)


def test_overlapped_pairs_print_and_parse():
    assert str(PAIR) == "(0F3;7B1)OVERLAP_F_B"
    assert Overlap.parse(str(PAIR)) == PAIR


@pytest.mark.parametrize("text", ["(0F3;7B1)", "(0F3,7B1)OVERLAP_F_B", "(0F3;7B1;0F4)OVERLAP_F_B", "0F3;7B1"])
def test_only_pairs_parse_as_pairs(text):
    with pytest.raises(ScheduleError, match=r"an overlapped pair must be written as \(F;B\)OVERLAP_F_B; got"):
        Overlap.parse(text)


def test_a_pair_is_a_forward_and_a_whole_backward():
    with pytest.raises(ScheduleError, match=r"one F and one B, in that order; got \(0F0;0I1\)"):
        Overlap(Action(0, "F", 0), Action(0, "I", 1))


def test_costs_of_a_rank_are_shared_by_its_stages():
    each = Costs(F=2.0, I=4.0, W=1.0, comm=0.1, memory_after_I=0.5).per_stage(((0, 3), (1,), (2,)))
    assert each.F == (1.0, 2.0, 2.0, 1.0)
    assert each.I == (2.0, 4.0, 4.0, 2.0)
    assert each.of("B", 0) == 2.5
    assert each.keeps == (0.5, 1.0, 1.0, 0.5)
    assert each.keeps_after_i == (0.25, 0.5, 0.5, 0.25)


def test_costs_of_each_stage_are_used_as_they_are():
    costs = Costs(F=[1, 3], W=(0.5, 0.25))
    assert costs.F == (1.0, 3.0)
    assert costs.per_stage(((0, 1),)).F == (1.0, 3.0)
    assert costs.per_stage(((0, 1),)).I == (0.5, 0.5)
    assert hash(costs) == hash(Costs(F=(1, 3), W=[0.5, 0.25]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"F": -1.0}, r"a cost must be finite and not negative; got F=-1.0"),
        ({"comm": float("nan")}, "a cost must be finite and not negative; got comm=nan"),
        ({"I": [1.0, float("inf")]}, r"a cost must be finite and not negative; got I\[1\]=inf"),
        ({"W": "1"}, "a cost must be a number; got W='1'"),
        ({"memory_after_I": True}, "a cost must be a number; got memory_after_I=True"),
        ({"F": []}, "one number for each stage; got none for F"),
        ({"F": [1.0], "I": [1.0, 2.0]}, "one number for each stage; got 1 for F, 2 for I"),
    ],
)
def test_costs_say_what_is_wrong_with_them(options, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**options)


def test_costs_that_do_not_fit_the_stages():
    s = schedule.make("1f1b", ranks=3, microbatches=3)
    with pytest.raises(ScheduleError, match=r"one number for each of the 3 stages; got 2 for F. Fix: pass 3 numbers"):
        s.simulate(Costs(F=[1.0, 2.0]))


def test_a_schedule_knows_its_shape():
    s = schedule.make("zb-v", ranks=3, microbatches=5)
    assert (s.ranks, s.num_stages, s.stages_per_rank) == (3, 6, 2)
    assert [s.rank_of(stage) for stage in range(6)] == list(s.stage_ranks()) == [0, 1, 2, 2, 1, 0]
    with pytest.raises(ScheduleError, match="stage must be 0 to 5; got 6"):
        s.rank_of(6)


def test_a_schedule_is_frozen_also_if_made_of_lists():
    s = Schedule("mine", 1, [[0]], [[Action(0, "F", 0), Action(0, "B", 0)]])  # type: ignore[arg-type]
    assert s.placement == ((0,),)
    assert hash(s) == hash(Schedule("mine", 1, ((0,),), ((Action(0, "F", 0), Action(0, "B", 0)),)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("microbatches", "placement", "actions", "message"),
    [
        (0, ((0,),), ((),), "n_microbatches must be at least 1; got 0"),
        (1, ((0,),), ((), ()), "one entry for each rank; got 1 in placement, 2 in actions"),
        (1, (), (), "one entry for each rank; got 0 in placement"),
        (1, ((0,), (0,)), ((), ()), r"every stage exactly once, counted from 0; got \(\(0,\), \(0,\)\)"),
        (1, ((0,), (2,)), ((), ()), "every stage exactly once"),
        (1, ((),), ((),), "every stage exactly once"),
    ],
)
def test_a_schedule_is_placed_whole(microbatches, placement, actions, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule("mine", microbatches, placement, actions)
