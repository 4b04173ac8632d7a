"""docs/schedules.md says what is so: its numbers, its drawing, its error."""

import re
from pathlib import Path

import pytest

from sternway import schedule
from sternway.errors import ScheduleError
from sternway.schedule import Costs

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
MEASURED = Costs(F=18.522, I=18.086, W=9.337, comm=0.601, memory_after_I=0.3664)


@pytest.mark.parametrize("name", schedule.names() + schedule.names(copies=2))
def test_its_table_of_numbers(name):
    s = schedule.make(name, ranks=8, microbatches=24)
    equal, measured = s.simulate(), s.simulate(MEASURED)
    row = (
        f"| `{name}` | {equal.bubble_rate:.2%} | {equal.peak_memory:g} "
        f"| {measured.bubble_rate:.2%} | {measured.peak_memory:g} |"
    )
    assert row in PAGE
    assert f"| `{name}` | " in PAGE.split("## Costs")[0].split("What that comes to")[0]


def test_its_drawing():
    assert schedule.make("zb-h1", ranks=2, microbatches=3).draw() in PAGE


def test_its_error():
    broken = schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match="a deadlock") as caught:
        broken.check()
    assert str(caught.value) in re.sub(r"\s*\n", " ", PAGE)
