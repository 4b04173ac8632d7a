"""Schedules as JSON: the fields of ``Schedule``, with actions in their text form."""

import json
from typing import Any

from sternway.errors import ScheduleError
from sternway.schedule._action import Step, parse_step
from sternway.schedule._schedule import Schedule

_FORMAT = "sternway.schedule/1"
_FIX = "write it with to_json"
_FIELDS = ("format", "name", "n_microbatches", "placement", "actions")


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON.

    Example:
        >>> from sternway import schedule
        >>> print(to_json(schedule.make("1f1b", ranks=1, microbatches=1)))
        {
         "format": "sternway.schedule/1",
         "name": "1f1b",
         "n_microbatches": 1,
         "placement": [[0]],
         "actions": [
          ["0F0", "0B0"]
         ]
        }
    """
    # One line for each rank: easy to read and to diff.
    rows = ",\n  ".join(json.dumps([str(step) for step in steps]) for steps in schedule.actions)
    # Only where there are such stages, so that files of before are the same.
    again = f' "recompute": {json.dumps(schedule.recompute)},\n' if schedule.recompute else ""
    copies = f' "copies": {schedule.copies},\n' if schedule.copies > 1 else ""
    return (
        f'{{\n "format": "{_FORMAT}",\n "name": {json.dumps(schedule.name)},\n'
        f' "n_microbatches": {schedule.n_microbatches},\n'
        f' "placement": {json.dumps(schedule.placement)},\n{again}{copies} "actions": [\n  {rows}\n ]\n}}'
    )


def from_json(text: str) -> Schedule:
    """Read what ``to_json`` wrote.

    Raises:
        ScheduleError: the text is not JSON, or not a schedule, with the position.
    """
    ScheduleError.unless(isinstance(text, str), "text must be a string", text, _FIX)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise ScheduleError("a schedule file must be JSON", got=where, fix=_FIX) from None
    except (RecursionError, ValueError) as error:  # brackets without end, a number without end
        raise ScheduleError("a schedule file must be JSON", got=str(error), fix=_FIX) from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f"a schedule file must have the format {_FORMAT}", got=repr(found), fix=_FIX)
    if sorted(data.keys() - {"recompute", "copies"}) != sorted(_FIELDS):
        raise ScheduleError(f"a schedule file must have the fields {', '.join(_FIELDS)}", got=", ".join(data), fix=_FIX)
    name, microbatches = data["name"], data["n_microbatches"]
    if not isinstance(name, str) or type(microbatches) is not int:
        raise ScheduleError(
            "name must be a string and n_microbatches an int", got=f"{name!r} and {microbatches!r}", fix=_FIX
        )
    placement = tuple(map(tuple, _rows("placement", data["placement"], int)))
    rows = _rows("actions", data["actions"], str)
    actions = [[_step(cell, rank, step) for step, cell in enumerate(row)] for rank, row in enumerate(rows)]
    again, copies = data.get("recompute", []), data.get("copies", 1)
    ScheduleError.unless(isinstance(again, list), "recompute must be a list of stages", again, _FIX)
    return Schedule(name, microbatches, placement, tuple(map(tuple, actions)), tuple(again), copies)


def _step(cell: str, rank: int, step: int) -> Step:
    """Read one action, or raise ScheduleError with its position."""
    try:
        return parse_step(cell)
    except ScheduleError as error:
        raise ScheduleError(error.rule, got=f"{error.got} at rank {rank}, step {step}", fix=error.fix) from None


def _rows(field: str, value: Any, kind: type) -> list[list[Any]]:
    """Return a list of lists of one type, or raise ScheduleError."""
    if isinstance(value, list) and all(
        isinstance(row, list) and all(type(item) is kind for item in row) for row in value
    ):
        return value
    raise ScheduleError(
        f"{field} must be a list of lists of {kind.__name__}, one for each rank",
        got=type(value).__name__ if not isinstance(value, list) else "a list of something else",
        fix=_FIX,
    )
