"""A timeline for chrome://tracing and ui.perfetto.dev: one track for each rank, a counter of its memory,
and a track for what its link carries, where stages are sharded."""

import json
from collections.abc import Iterator

from sternway.schedule._action import Overlap, Upkeep
from sternway.schedule._simulate import LINKS
from sternway.schedule._timeline import Event, Timeline

# Chrome's own colour names; Perfetto picks its own by the event's name.
_COLORS = {
    "F": "thread_state_running",
    "I": "thread_state_iowait",
    "W": "thread_state_runnable",
    "B": "rail_animation",
}


def to_chrome_trace(timeline: Timeline) -> str:
    """Write a timeline as a Chrome trace. One unit of cost is a millisecond.

    Example:
        >>> from sternway import schedule
        >>> import json
        >>> trace = json.loads(schedule.make("1f1b", ranks=1, microbatches=1).simulate().to_chrome_trace())
        >>> [(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
        [('0F0', 0.0, 1000.0), ('0B0', 1000.0, 2000.0)]
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": timeline.schedule.name}}
    ]
    critical = {(event.rank, event.step) for event in timeline.critical_path}
    for rank, steps in enumerate(timeline.events):
        label = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": label})
        place = {"sort_index": rank}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": place})
        computing = [event for event in steps if not isinstance(event.action, Upkeep)]
        for event in computing:
            again = timeline.schedule.runs_again(event.action)
            events.append(_slice(event, (rank, event.step) in critical, again))
        if len(computing) < len(steps):
            events += _links(timeline, rank, critical)
    for rank, curve in enumerate(timeline.memory):
        for time, level in curve:
            args = {"microbatches": level}
            name = f"memory of rank {rank}"
            events.append({"ph": "C", "name": name, "pid": 0, "ts": time * 1e3, "args": args})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _slice(event: Event, critical: bool, again: bool) -> dict[str, object]:
    """Return one step as a complete event."""
    first = event.action.actions[0]
    kind = "F+B" if isinstance(event.action, Overlap) else first.op
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": kind,
        "pid": 0,
        "tid": event.rank,
        "ts": event.start * 1e3,
        "dur": (event.end - event.start) * 1e3,
        "cname": _COLORS[first.op],
        "args": {
            "stage": [action.stage for action in event.action.actions],
            "microbatch": [action.microbatch for action in event.action.actions],
            "critical_path": critical,
            "forward_again": again,
        },
    }


_TRACKS = {"net": "gathers and reductions", "out": "offloads", "back": "reloads"}


def _links(timeline: Timeline, rank: int, critical: set[tuple[int, int]]) -> Iterator[dict[str, object]]:
    """Yield what the links of a rank carry, each link on a track of its own."""
    for place, (link, name) in enumerate(_TRACKS.items()):
        track = (place + 1) * len(timeline.events) + rank
        carried = [event for event in timeline.events[rank] if isinstance(event.action, Upkeep)]
        carried = [event for event in carried if LINKS[event.action.op] == link]  # type: ignore[union-attr]
        if carried:
            label = {"name": f"rank {rank}: {name}"}
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": label}
            yield from (_upkeep(event, track, (rank, event.step) in critical) for event in carried)


def _upkeep(event: Event, track: int, critical: bool) -> dict[str, object]:
    """Return what a link carries as a complete event."""
    assert isinstance(event.action, Upkeep)
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": event.action.op,
        "pid": 0,
        "tid": track,
        "ts": event.start * 1e3,
        "dur": (event.end - event.start) * 1e3,
        "args": {"stage": [event.action.stage], "critical_path": critical},
    }
