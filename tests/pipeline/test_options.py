"""Which plans "auto" chooses among, for costs that are given."""

from __future__ import annotations

import pytest
from torch import nn

from sternway.errors import ScheduleError
from sternway.pipeline import LocalTransport
from sternway.pipeline.build._best_option import PlanOption
from sternway.pipeline.build._options import _agreed_options, _fastest
from sternway.pipeline.build._request import BuildRequest
from sternway.schedule import Costs, candidates, make

V, LOOPED = ((0, 7), (1, 6), (2, 5), (3, 4)), ((0, 4), (1, 5), (2, 6), (3, 7))
FROZEN = Costs(F=(0.5,) * 8, I=(1.0,) * 8, W=(0.0,) * 8, B=(1.0,) * 8, comm=0.05)
"""Stages whose weights are not trained."""


def options(costs: Costs, limit: float | None, ranks: int = 4) -> list[PlanOption]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 * ranks)))
    request = BuildRequest(model, "auto", ranks=ranks, n_microbatches=8, memory_limit=limit)
    return _agreed_options(request, [list(range(2 * ranks))], [costs], [None], LocalTransport())


def test_within_a_limit_stages_may_be_looped() -> None:
    found = options(FROZEN, 4.0)
    assert [option.schedule.placement for option in found] == [V, LOOPED]
    best = min(found, key=lambda option: option.cost())
    assert best.schedule.placement == LOOPED
    named = make("interleaved-1f1b", ranks=4, microbatches=8).simulate(FROZEN)
    assert named.peak_memory > 4.0 or best.cost()[0] <= named.period
    assert best.schedule.simulate(FROZEN).peak_memory <= 4.0


def test_within_ample_memory_they_are_in_a_v() -> None:
    assert [option.schedule.placement for option in options(FROZEN, None)] == [V]


def large(*stages: int) -> Costs:
    """Stages of which some keep ten times as much as the others."""
    sizes = tuple(1.0 if stage in stages else 0.1 for stage in range(8))
    return Costs(F=1.0, I=1.0, W=1.0, memory_after_F=sizes, memory_after_I=0.1)


@pytest.mark.parametrize(("stages", "left"), [((0, 4), V), ((0, 7), LOOPED)])
def test_a_placement_that_does_not_fit_is_left_out(stages: tuple[int, int], left: tuple[tuple[int, ...], ...]) -> None:
    found = options(large(*stages), 1.5)
    assert [option.schedule.placement for option in found] == [left], "rank 0 would hold both large stages"


def test_if_none_fits_it_is_said_what_is_needed() -> None:
    with pytest.raises(ScheduleError, match="memory_limit must be large enough for one microbatch"):
        options(large(*range(8)), 1.5)


def test_stages_of_one_rank_are_searched_once() -> None:
    assert len(options(Costs(), 4.0, ranks=1)) == 1


@pytest.mark.parametrize(
    ("times", "best", "count"),
    [
        ({"a": [1.05, 0.9], "b": [1.0, 1.0], "c": [1.2]}, "a", 5),  # a was held up in its first try
        ({"a": [1.0, 1.3], "b": [1.05, 1.05]}, "a", 4),  # and here in its second
        ({"a": [1.0], "b": [1.2], "c": [1.3]}, "a", 3),  # none is close: none is tried again
        ({"a": [1.0]}, "a", 1),
    ],
)
def test_close_ones_are_tried_twice(times: dict[str, list[float]], best: str, count: int) -> None:
    tried: list[str] = []

    def seconds(option: str) -> float:
        tried.append(option)
        return times[option][tried.count(option) - 1]

    assert _fastest(list(times), seconds) == best
    assert len(tried) == count


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v"])
def test_what_is_tried_later_has_the_same_placement(name: str) -> None:
    running = make(name, ranks=4, microbatches=8)
    found = candidates(running, FROZEN, memory_limit=6.0, count=10)
    assert all(plan.placement == running.placement for plan in found)
    assert any(plan.name.startswith("search") for plan in found)
