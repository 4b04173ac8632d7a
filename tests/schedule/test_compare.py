"""The comparison: every schedule, one limit, the best of those that fit."""

import xml.etree.ElementTree as ElementTree

import pytest

from sternway.errors import ScheduleError
from sternway.schedule import Costs, compare, lower_bound, names, search

COSTS = Costs(F=2.0, I=2.0, W=1.0, comm=0.1, memory_after_I=0.5)
NUMBERS = {"ranks": 4, "microbatches": 8, "memory_limit": 4}


@pytest.fixture(scope="module")
def comparison():
    return compare(COSTS, **NUMBERS)


def test_every_schedule_has_its_row(comparison):
    told = [row.name for row in comparison.rows] + [name for name, _ in comparison.unmade]
    assert sorted(told) == sorted([*names(), "search", "search-v"])


def test_rows_are_what_a_simulation_says(comparison):
    for row in comparison.rows:
        timeline = row.schedule.check().simulate(COSTS)
        assert row.timeline == timeline
        assert (row.bubble_rate, row.makespan) == (timeline.bubble_rate, timeline.makespan)
        assert row.peak_memory == timeline.peak_memory
        assert row.fits == (timeline.peak_memory <= 4 + 1e-9)
        assert row.gap == pytest.approx(timeline.span / row.bound - 1, abs=1e-9)
        assert row.gap >= 0 or not row.fits


def test_those_that_fit_come_first_and_the_best_of_them_is_the_best(comparison):
    fits = [row.fits for row in comparison.rows]
    assert fits == sorted(fits, reverse=True)
    assert any(fits)
    assert not all(fits)
    fitting = [row for row in comparison.rows if row.fits]
    costs = [row.timeline.span for row in fitting]
    assert costs == pytest.approx(sorted(costs))
    assert comparison.best == fitting[0]
    assert comparison.best.name in ("search", "search-v")


def test_the_bound_is_that_of_the_limit(comparison):
    bounds = {row.name: row.bound for row in comparison.rows}
    assert bounds["search"] == bounds["zb-h2"] == lower_bound(COSTS, **NUMBERS)
    assert bounds["search-v"] == bounds["zb-v"] == lower_bound(COSTS, **NUMBERS, stages_per_rank=2)


def test_the_table_reads_as_text(comparison):
    lines = comparison.table().splitlines()
    head = ["schedule", "stages/rank", "bubble rate", "period", "makespan", "peak memory", "over the bound"]
    assert lines[0].split("  ")[0] == "schedule"
    assert [name for name in head if name not in lines[0]] == []
    assert lines[1].split()[0] == comparison.best.name
    assert len(lines) == 1 + len(comparison.rows) + len(comparison.unmade)
    assert any(line.startswith("gpipe") and line.endswith("4 over the memory limit") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_what_cannot_be_made_is_listed_with_the_reason():
    comparison = compare(Costs(F=[1.0, 2.0, 1.0]), ranks=3, microbatches=4, memory_limit=3)
    unmade = dict(comparison.unmade)
    assert "one number for each of the 6 stages; got 3 for F" in unmade["zb-v"]
    assert "one number for each of the 6 stages; got 3 for F" in unmade["search-v"]
    searched = next(row for row in comparison.rows if row.name == "search")
    assert comparison.best.timeline.span == pytest.approx(searched.timeline.span)
    assert "got 3 for F" in comparison.table()


def test_one_rank_and_one_microbatch_have_nothing_to_gain():
    comparison = compare(Costs(), ranks=1, microbatches=1, memory_limit=1)
    assert {row.gap for row in comparison.rows} == {0.0}


@pytest.mark.parametrize(
    ("costs", "numbers", "message"),
    [
        (Costs(), {"memory_limit": 0.5}, "got memory_limit=0.5. Fix: pass 1 or more$"),
        (Costs(), {"ranks": 0}, "ranks must be an int, 1 or more; got ranks=0"),
        (Costs(F=[1.0] * 5), {}, "one number for each of the 8 stages; got 5 for F"),
    ],
)
def test_where_nothing_fits_it_says_what_would(costs, numbers, message):
    with pytest.raises(ScheduleError, match=message):
        compare(costs, **NUMBERS | numbers)


def test_progress_goes_up_to_the_end():
    told = []
    compare(COSTS, **NUMBERS, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (2000, 2000)


def test_what_a_comparison_prints(comparison):
    title, *lines = str(comparison).split("\n")
    assert title == "4 ranks, 8 microbatches, memory limit 4"
    assert lines == comparison.table().split("\n")
    assert repr(comparison) == f"<Comparison of 13 schedules: {title}; best {comparison.best.name}>"


def test_notebooks_show_a_table():
    comparison = compare(Costs(), ranks=2, microbatches=2, memory_limit=2)
    table = ElementTree.fromstring(comparison._repr_html_())
    assert table.find("caption").text == "2 ranks, 2 microbatches, memory limit 2"
    head, *rows = ([cell.text or "" for cell in row] for row in table.iter("tr"))
    assert head[:2] == ["schedule", "stages/rank"]
    told = [row.name for row in comparison.rows] + [name for name, _ in comparison.unmade]
    assert [row[0] for row in rows] == told
    assert {len(row) for row in rows} == {len(head)}


def test_a_limit_in_bytes_is_the_limit_in_microbatches():
    numbers = {"ranks": 3, "microbatches": 6}
    costs = Costs(W=0.7, activation_bytes=1e9, static_bytes=4e9)
    assert search(costs, **numbers, memory="7GB") == search(costs, **numbers, memory_limit=3)
    assert lower_bound(costs, **numbers, memory=7_000_000_000) == lower_bound(costs, **numbers, memory_limit=3)
    within = compare(costs, **numbers, memory="7GB")
    assert within.memory_limit == 3
    assert all((row.peak_bytes <= 7e9) == row.fits for row in within.rows)
    lines = within.table().splitlines()
    assert any(line.startswith("gpipe") and line.endswith("2.8 GiB over the memory limit") for line in lines)
    for wrong, text in (
        ({}, "a search needs a memory limit"),
        ({"memory": "7GB", "memory_limit": 3}, "not both"),
        ({"memory": "4.5GB"}, "give it 4.7 GiB or more"),
    ):
        with pytest.raises(ScheduleError, match=text):
            search(costs, **numbers, **wrong)
    with pytest.raises(ScheduleError, match="needs the bytes"):
        compare(Costs(), **numbers, memory="7GB")


def test_the_verdict_says_whether_more_memory_would_help():
    tight = compare(Costs(), ranks=4, microbatches=8, memory_limit=2)
    more = lower_bound(Costs(), ranks=4, microbatches=8, memory_limit=3, stages_per_rank=2)
    assert tight.best.schedule.stages_per_rank == 2
    assert tight.verdict.endswith(f"3 instead of 2 would lower the bound by {1 - more / tight.best.bound:.1%}")
    assert compare(Costs(), ranks=2, microbatches=4, memory_limit=4).verdict.endswith("memory does not bind")


@pytest.mark.parametrize("limit", [[4, 4, 4, 4], "4"])
def test_one_limit_for_all_ranks(limit):
    with pytest.raises(ScheduleError, match=r"one memory limit for all ranks; got memory_limit=.*search"):
        compare(COSTS, **NUMBERS | {"memory_limit": limit})
