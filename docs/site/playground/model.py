"""What the playground runs in the browser: settings of sliders in, rows of a table and a drawing out, as JSON."""

from __future__ import annotations

import json
from typing import Any

from sternway import schedule
from sternway.errors import ScheduleError

SEARCHED = {"search": 1, "search-v": 2}  # stages on each rank


def _costs(settings: dict[str, Any]) -> schedule.Costs:
    return schedule.Costs(**{name: settings[name] for name in ("F", "I", "W", "comm", "memory_after_I")})


def _plan(settings: dict[str, Any], name: str) -> schedule.Schedule:
    ranks, microbatches = settings["ranks"], settings["microbatches"]
    if name not in SEARCHED:
        return schedule.make(name, ranks=ranks, microbatches=microbatches)
    return schedule.search(
        _costs(settings),
        ranks=ranks,
        microbatches=microbatches,
        memory_limit=settings["memory_limit"],
        stages_per_rank=SEARCHED[name],
    )


def names() -> str:
    """The schedules with a name, and those that are searched for."""
    return json.dumps({"named": list(schedule.names()), "searched": list(SEARCHED)})


def row(text: str, name: str) -> str:
    """One schedule: its numbers and its drawing, or why there is none."""
    settings = json.loads(text)
    try:
        timeline = _plan(settings, name).simulate(_costs(settings))
    except ScheduleError as error:
        return json.dumps({"name": name, "problem": str(error)})
    return json.dumps(
        {
            "name": name,
            "makespan": timeline.makespan,
            "period": timeline.period,
            "bubble": timeline.bubble_rate,
            "memory": timeline.peak_memory,
            "fits": timeline.peak_memory <= settings["memory_limit"] + 1e-9,
            "svg": timeline.to_svg(),
        }
    )
