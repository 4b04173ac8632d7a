"""Every named schedule, for any ranks and microbatches: it passes check, or an error says what would."""

import importlib

import pytest

from sternway import schedule
from sternway.errors import ScheduleError

SEVERAL = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")
SMALL = [(ranks, microbatches) for ranks in range(1, 7) for microbatches in (*range(1, 14), 19, 24)]

# The drawing at the head of each generator's file: module, ranks, microbatches.
PICTURES = {
    "gpipe": ("_gpipe", 2, 3),
    "1f1b": ("_one_f_one_b", 2, 3),
    "interleaved-1f1b": ("_interleaved_1f1b", 2, 2),
    "looped-bfs": ("_looped_bfs", 2, 2),
    "zb-h1": ("_zb_h1", 2, 3),
    "zb-h2": ("_zb_h2", 2, 4),
    "interleaved-zb": ("_interleaved_zb", 2, 2),
    "zb-v": ("_zb_v", 2, 3),
    "v-half": ("_v_half", 2, 3),
    "v-min": ("_v_min", 2, 3),
    "dualpipe-v": ("_dualpipe_v", 2, 4),
}


@pytest.mark.parametrize("name", schedule.names())
def test_any_ranks_and_microbatches(name):
    for ranks, microbatches in SMALL:
        for stages in (1, 2, 3) if name in SEVERAL else (None,):
            if name == "dualpipe-v" and microbatches < 2 * ranks:
                continue
            s = schedule.make(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
            assert s.check() is s
            assert (s.name, s.ranks, s.n_microbatches) == (name, ranks, microbatches)


@pytest.mark.parametrize("name", schedule.names())
def test_making_it_twice_makes_the_same(name):
    assert schedule.make(name, ranks=3, microbatches=7) == schedule.make(name, ranks=3, microbatches=7)


@pytest.mark.parametrize("name", schedule.names())
def test_the_drawing_at_the_head_of_its_file(name):
    module, ranks, microbatches = PICTURES[name]
    text = importlib.import_module(f"sternway.schedule.named.{module}").__doc__
    drawing = schedule.make(name, ranks=ranks, microbatches=microbatches).draw(width=104)
    for line in drawing.split("\n")[1:]:
        assert f"    {line}\n" in text
    assert "arXiv" in text


def test_the_names_are_those_promised():
    assert set(schedule.names()) == set(PICTURES)


def test_placements():
    assert schedule.make("zb-h1", ranks=3, microbatches=3).placement == ((0,), (1,), (2,))
    assert schedule.make("looped-bfs", ranks=2, microbatches=3, stages_per_rank=3).placement == (
        (0, 2, 4),
        (1, 3, 5),
    )
    for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        assert schedule.make(name, ranks=3, microbatches=6).placement == ((0, 5), (1, 4), (2, 3))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ScheduleError, match=r"name is not known; got '2f2b'. Fix: use one of gpipe, 1f1b, .*dualpipe-v"
    ):
        schedule.make("2f2b", ranks=2, microbatches=2)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_numbers_are_whole_and_positive(value):
    with pytest.raises(ScheduleError, match="ranks must be an int, 1 or more; got"):
        schedule.make("1f1b", ranks=value, microbatches=2)
    with pytest.raises(ScheduleError, match="microbatches must be an int, 1 or more; got"):
        schedule.make("1f1b", ranks=2, microbatches=value)
    with pytest.raises(ScheduleError, match="stages_per_rank must be an int, 1 or more; got"):
        schedule.make("looped-bfs", ranks=2, microbatches=2, stages_per_rank=value)


def test_stages_per_rank_where_it_is_fixed():
    with pytest.raises(
        ScheduleError, match=r"zb-v must have 2 stages per rank; got stages_per_rank=3.*interleaved-1f1b"
    ):
        schedule.make("zb-v", ranks=2, microbatches=4, stages_per_rank=3)
    assert schedule.make("zb-v", ranks=2, microbatches=4, stages_per_rank=2).num_stages == 4


def test_dualpipe_v_says_how_many_microbatches_would_do():
    with pytest.raises(ScheduleError, match=r"needs at least .* 8 for 4 ranks; got 7. Fix: use 8 or more, or zb-v"):
        schedule.make("dualpipe-v", ranks=4, microbatches=7)
