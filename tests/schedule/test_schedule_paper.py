"""Numbers from the papers: the measured rows of arXiv 2401.10241, its formulas, and those of 2405.15362."""

import json
from pathlib import Path

import pytest

from sternway import schedule
from sternway.schedule import Costs

ROWS = json.loads((Path(__file__).parents[1] / "data" / "zero_bubble.json").read_text())["rows"]
COSTS = [(1, 1, 1), (1, 1, 0.5), (2, 1, 0.5), (1, 2, 1), (1, 1.5, 0.9), (2, 2, 1), (1, 1, 0)]
GRID = [(ranks, factor * ranks + extra) for ranks in range(1, 9) for factor, extra in ((1, 0), (2, 0), (3, 1))]


def idle(timeline) -> float:
    return timeline.span - max(timeline.busy)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_bubble_rates_of_the_zero_bubble_paper(row, name):
    costs = Costs(F=row["F"], I=row["I"], W=row["W"], comm=row["comm"], memory_after_I=row["memory_after_I"])
    s = schedule.make(name, ranks=row["ranks"], microbatches=row["microbatches"])
    assert round(s.simulate(costs).bubble_rate, 4) == row["bubble_rate"][name]


@pytest.mark.parametrize(("f", "i", "w"), COSTS)
@pytest.mark.parametrize(("ranks", "microbatches"), GRID)
def test_idle_time_and_memory_of_one_stage_a_rank(ranks, microbatches, f, i, w):
    expected = {
        "gpipe": ((ranks - 1) * (f + i + w), microbatches),
        "1f1b": ((ranks - 1) * (f + i + w), ranks),
        "zb-h1": ((ranks - 1) * (f + i - w), ranks),
        "zb-h2": ((ranks - 1) * max(0, f + i - 2 * w), 2 * ranks - 1),
    }
    for name, (waiting, memory) in expected.items():
        if name == "zb-h2" and microbatches < 2 * ranks - 1:
            continue  # its formula needs a full pipeline
        t = schedule.make(name, ranks=ranks, microbatches=microbatches).simulate(Costs(F=f, I=i, W=w))
        assert idle(t) == pytest.approx(waiting), name
        assert t.peak_memory == memory, name


@pytest.mark.parametrize("ranks", range(1, 17))
def test_zb_v_has_no_bubble_within_1f1b_memory(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks + 1):
        t = schedule.make("zb-v", ranks=ranks, microbatches=microbatches).simulate()
        assert t.bubble_rate == 0
        assert t.peaks == (ranks,) * ranks


@pytest.mark.parametrize("ranks", range(1, 17))
def test_v_half_and_v_min_have_the_memory_and_idle_time_of_their_table(ranks):
    # Table of 2405.15362, with F = I = W: bubble rates of p / 2m and 2p / 3m, so 3p / 2 and 2p of idle time.
    for microbatches in (ranks, 2 * ranks, 4 * ranks + 1):
        half = schedule.make("v-half", ranks=ranks, microbatches=microbatches).simulate()
        least = schedule.make("v-min", ranks=ranks, microbatches=microbatches).simulate()
        assert half.peak_memory == (ranks + 2) // 2
        assert least.peak_memory == (ranks + 4) // 3
        assert idle(half) <= 1.5 * ranks
        assert idle(least) <= 2 * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(
    "times", [(1, 1.3, 0.7), (1.2, 1, 0.6), (1, 1.25, 0.5), (1.2, 1, 0.4), (1, 1.5, 1), (1.5, 1, 1)]
)
def test_zb_v_and_v_half_have_no_idle_time_in_every_microbatch(ranks, times):
    # 2405.15362: so it is if W + 2 I >= 2 F and W + 2 F >= 2 I. What is idle at both ends does not grow with m.
    f, i, w = times
    assert w + 2 * i >= 2 * f
    assert w + 2 * f >= 2 * i
    for name in ("zb-v", "v-half"):
        few, many = (
            idle(schedule.make(name, ranks=ranks, microbatches=m).simulate(Costs(F=f, I=i, W=w)))
            for m in (2 * ranks, 5 * ranks)
        )
        assert many <= few + 1e-9, name


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_interleaving_divides_the_idle_time(ranks, stages_per_rank):
    whole = schedule.make("1f1b", ranks=ranks, microbatches=4 * ranks).simulate()
    for name in ("interleaved-1f1b", "looped-bfs"):
        parts = schedule.make(name, ranks=ranks, microbatches=4 * ranks, stages_per_rank=stages_per_rank)
        assert idle(parts.simulate()) == pytest.approx(idle(whole) / stages_per_rank), name


def test_dualpipe_v_keeps_one_stage_more_than_zb_v():
    # DualPipe's table has p + 1 chunks; cut in half, each rank's pair of stages adds one half.
    for ranks in (2, 4, 8):
        t = schedule.make("dualpipe-v", ranks=ranks, microbatches=4 * ranks).simulate()
        assert t.peak_memory == ranks + 0.5
