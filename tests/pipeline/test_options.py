"""Which plans "auto" chooses among, for costs that are given."""

from __future__ import annotations

import pytest
from torch import nn

from sternway.pipeline import LocalTransport
from sternway.pipeline.build._options import PlanOption, _agreed_options
from sternway.pipeline.build._request import BuildRequest
from sternway.schedule import Costs, candidates, make

V, LOOPED = ((0, 7), (1, 6), (2, 5), (3, 4)), ((0, 4), (1, 5), (2, 6), (3, 7))
FROZEN = Costs(F=(0.5,) * 8, I=(1.0,) * 8, W=(0.0,) * 8, B=(1.0,) * 8, comm=0.05)
"""Stages whose weights are not trained."""


def options(costs: Costs, limit: float | None) -> list[PlanOption]:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    request = BuildRequest(model, "auto", ranks=4, n_microbatches=8, memory_limit=limit)
    return _agreed_options(request, [list(range(8))], [costs], [None], LocalTransport())


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


def test_a_placement_that_does_not_fit_is_left_out() -> None:
    first = Costs(F=1.0, I=1.0, W=1.0, memory_after_F=(1.0, *(0.1,) * 3, 1.0, *(0.1,) * 3), memory_after_I=0.1)
    found = options(first, 1.5)
    assert [option.schedule.placement for option in found] == [V], "rank 0 would hold both large stages"


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v"])
def test_what_is_tried_later_has_the_same_placement(name: str) -> None:
    running = make(name, ranks=4, microbatches=8)
    found = candidates(running, FROZEN, memory_limit=6.0, count=10)
    assert all(plan.placement == running.placement for plan in found)
    assert any(plan.name.startswith("search") for plan in found)
