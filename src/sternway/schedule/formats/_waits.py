"""Where sends and reductions end: since torch 2.15, ``compute_comms`` says that, too.

    0F0, 0SEND_F0, 0RECV_B0, 0B0, 0WAIT_SEND_F0, 0REDUCE_GRAD, 0WAIT_REDUCE_GRAD

A rank's own backward of a microbatch proves that the next stage has its activation: there the wait for a sent
activation costs nothing, and frees it. For a sent gradient there is no such proof before the end.
"""

import re
from collections.abc import Iterable

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep
from sternway.schedule.formats._transfers import Instruction, Transfer, WaitStep

_WAIT = re.compile(r"(0|[1-9][0-9]*)(?:(WAIT_SEND_F|WAIT_SEND_B)(0|[1-9][0-9]*)|(WAIT_REDUCE_GRAD))")


def parse_wait(cell: str) -> WaitStep | None:
    """Read a cell, if it is a wait."""
    match = _WAIT.fullmatch(cell)
    if match is None:
        return None
    op, microbatch = match[2] or match[4], None if match[3] is None else int(match[3])
    return WaitStep(int(match[1]), op, microbatch)  # type: ignore[arg-type]  # the regex allows only these


def with_waits(steps: Iterable[Instruction]) -> list[Instruction]:
    """A rank's steps with the waits that torch 2.15 needs among them."""
    found: list[Instruction] = []
    pending: dict[WaitStep, None] = {}  # in order
    for step in steps:
        found.append(step)
        ended = _end_of(step)
        if ended is not None and ended.op == "WAIT_REDUCE_GRAD":
            found.append(ended)
        elif ended is not None:
            pending[ended] = None
        for action in step.actions if isinstance(step, Action | Overlap) else ():
            wait = WaitStep(action.stage, "WAIT_SEND_F", action.microbatch)
            if action.op in ("I", "B") and wait in pending:
                del pending[wait]
                found.append(wait)
    return [*found, *pending]


def check_waits(ranks: list[list[Instruction]]) -> None:
    """Check that waits, if there are any, end every send and every reduction once, and one reduction at a time.

    Raises:
        ScheduleError: with rank and step.
    """
    if not any(isinstance(step, WaitStep) for steps in ranks for step in steps):
        return  # of an older torch
    for rank, steps in enumerate(ranks):
        pending: dict[WaitStep, int] = {}
        for index, step in enumerate(steps):
            where = f"{step} (rank {rank}, step {index})"
            if isinstance(step, WaitStep):
                if step not in pending:
                    raise ScheduleError(
                        "a wait must come once, after what it waits for", got=where, fix="move it, or remove it"
                    )
                del pending[step]
                continue
            ended = _end_of(step)
            if ended is None:
                continue
            other = next((each for each in pending if each.op == "WAIT_REDUCE_GRAD"), None)
            if other is not None and ended.op == other.op:
                raise ScheduleError(
                    "one reduction of a rank must end before the next begins",
                    got=f"{where} without {other} before it",
                    fix=f"add {other}",
                )
            pending[ended] = index
        for wait, index in pending.items():
            raise ScheduleError(
                "every send and reduction must have a wait, if one has",
                got=f"{steps[index]} (rank {rank}, step {index}) without {wait} after it",
                fix="add it, or remove all waits",
            )


def _end_of(step: Instruction) -> WaitStep | None:
    """The wait for a step, if it is a send or a reduction."""
    if isinstance(step, Transfer) and step.op.startswith("SEND"):
        return WaitStep(step.stage, f"WAIT_{step.op}", step.microbatch)  # type: ignore[arg-type]  # of two that fit
    if isinstance(step, Upkeep) and step.op == "REDUCE_GRAD":
        return WaitStep(step.stage, "WAIT_REDUCE_GRAD")
    return None
