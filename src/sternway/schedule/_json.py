"""Schedules as JSON: the same fields, with actions in their text form."""

import json
from typing import Any

from sternway.errors import ScheduleError
from sternway.schedule._action import parse_step
from sternway.schedule._schedule import Schedule

_FORMAT = "sternway.schedule/1"
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
    # A line for each rank: readable, and a useful diff.
    rows = ",\n  ".join(json.dumps([str(step) for step in steps]) for steps in schedule.actions)
    return (
        f'{{\n "format": "{_FORMAT}",\n "name": {json.dumps(schedule.name)},\n'
        f' "n_microbatches": {schedule.n_microbatches},\n'
        f' "placement": {json.dumps(schedule.placement)},\n "actions": [\n  {rows}\n ]\n}}'
    )


def from_json(text: str) -> Schedule:
    """Read what ``to_json`` wrote.

    Raises:
        ScheduleError: text that is not JSON or not of that form, with the place.
    """
    ScheduleError.unless(isinstance(text, str), "a schedule is read from text", text, "pass what to_json wrote")
    try:
        data = json.loads(text)
    except (RecursionError, ValueError) as error:
        if not isinstance(error, json.JSONDecodeError):  # brackets without end, a number without end
            raise ScheduleError("a schedule file is JSON", got=str(error), fix="write it with to_json") from None
        raise ScheduleError(
            "a schedule file is JSON",
            got=f"{error.msg} at line {error.lineno}, column {error.colno}",
            fix="write it with to_json",
        ) from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ScheduleError(f"a schedule file has the format {_FORMAT}", got=repr(found), fix="write it with to_json")
    if sorted(data) != sorted(_FIELDS):
        raise ScheduleError(
            f"a schedule file has the fields {', '.join(_FIELDS)}",
            got=", ".join(data),
            fix="write it with to_json",
        )
    name, microbatches = data["name"], data["n_microbatches"]
    if not isinstance(name, str) or type(microbatches) is not int:
        raise ScheduleError(
            "name is text and n_microbatches a whole number",
            got=f"{name!r} and {microbatches!r}",
            fix="write it with to_json",
        )
    placement = tuple(tuple(row) for row in _rows("placement", data["placement"], int))
    actions = []
    for rank, row in enumerate(_rows("actions", data["actions"], str)):
        for step, cell in enumerate(row):
            try:
                parse_step(cell)
            except ScheduleError as error:
                where = f"{error.got} at rank {rank}, step {step}"
                raise ScheduleError(error.rule, got=where, fix=error.fix) from None
        actions.append(tuple(parse_step(cell) for cell in row))
    return Schedule(name, microbatches, placement, tuple(actions))


def _rows(field: str, value: Any, kind: type) -> list[list[Any]]:
    """Return a list of lists of one kind, or say that it is not one."""
    if isinstance(value, list) and all(
        isinstance(row, list) and all(type(item) is kind for item in row) for row in value
    ):
        return value
    raise ScheduleError(
        f"{field} is a list of lists of {kind.__name__}, one for each rank",
        got=type(value).__name__ if not isinstance(value, list) else "something else in it",
        fix="write it with to_json",
    )
