"""torch.distributed.pipelining's CSV: one line for each rank, one cell for each step.

There are two dialects. ``compute_only`` has F, I, W, B and overlapped pairs; empty cells are skipped. ``compute_comms``
also has sends, receives, and what torch does with a stage's parameters:

    0F0,0F1,0B0,0B1                                   0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD
    1F0,1B0,1F1,1B1                                   1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD

The reader accepts these forms only, and reports the line and column of anything else. torch's reader takes ``2F0junk``
as 2F0, ``1FOO`` as F without a microbatch, and the older ``0BW0`` as B without a microbatch.

Since torch 2.15 ``compute_comms`` also says where sends and reductions end (``_waits.py``). The reader takes
both forms.

A schedule that has upkeep keeps it in ``compute_comms``; one that has none is written with the upkeep of stages that
are gathered for the whole step, as torch's runtime wants it.
"""

import re
from collections.abc import Iterator

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep, parse_step
from sternway.schedule._offload import without_moves
from sternway.schedule._schedule import Dialect, Schedule
from sternway.schedule._upkeep import computed, sharded
from sternway.schedule.formats._transfers import Instruction, Transfer, check_transfers, with_transfers
from sternway.schedule.formats._waits import check_waits, parse_wait, with_waits

_TRANSFER = re.compile(r"(0|[1-9][0-9]*)(SEND_F|RECV_F|SEND_B|RECV_B)(0|[1-9][0-9]*)")
_OLD = re.compile(r"[0-9]+BW[0-9]+")
_DIALECTS = ("compute_only", "compute_comms")


def to_csv(schedule: Schedule, dialect: Dialect = "compute_only", *, waits: bool = False) -> str:
    """Write a schedule as the CSV of torch.distributed.pipelining.

    Example:
        >>> from sternway import schedule
        >>> print(to_csv(schedule.make("1f1b", ranks=2, microbatches=2)), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1

    Args:
        schedule: the schedule.
        dialect: ``compute_only``, or ``compute_comms`` for sends and receives too.
        waits: for ``compute_comms``, whether to say where sends and reductions end. torch 2.15 cannot read a file
            without that, and torch before 2.15 none with it.

    Raises:
        ScheduleError: the dialect is unknown; or it is ``compute_comms`` and the schedule does not pass ``check``.
    """
    _known(dialect)
    schedule = without_moves(schedule)  # which torch does not know
    if dialect == "compute_only":
        lines = [",".join(map(str, computed(steps))) for steps in schedule.actions]
    else:
        kept = any(isinstance(step, Upkeep) for steps in schedule.actions for step in steps)
        rows = with_transfers(schedule if kept else sharded(schedule))
        lines = [",".join(map(str, with_waits(steps) if waits else steps)) for steps in rows]
    return "\n".join(lines) + "\n"


def from_csv(
    text: str, *, name: str = "csv", dialect: Dialect | None = None, upkeep: bool = False, copies: int = 1
) -> Schedule:
    """Read the CSV of torch.distributed.pipelining; a stage is placed on the rank that runs it.

    Example:
        >>> s = from_csv("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1\\n")
        >>> s.ranks, s.n_microbatches, s.placement
        (2, 2, ((0,), (1,)))

    Args:
        text: the content of the file.
        name: the name of the schedule.
        dialect: the dialect to expect; either, if None.
        upkeep: whether to keep UNSHARD, RESHARD and REDUCE_GRAD, which a schedule has if its stages are sharded.
        copies: how often the model is held, which the file does not say; see ``Schedule``.

    Returns:
        The schedule, not yet checked: call ``check``. Sends and receives are checked here, because a schedule does
        not keep them.

    Raises:
        ScheduleError: a cell is not in the dialect, with line and column; or a transfer is missing, unneeded or stuck.
    """
    ScheduleError.unless(isinstance(text, str), "text must be a string", text, "pass what to_csv wrote")
    ScheduleError.unless(isinstance(name, str), "name must be a string", name, 'pass name="mine"')
    if dialect is not None:
        _known(dialect)
    ranks: list[list[Instruction]] = []
    holder: dict[int, int] = {}
    n_microbatches = 0
    lines = text.removesuffix("\n").removesuffix("\r").split("\n")
    for rank, line in enumerate(lines):
        steps: list[Instruction] = []
        for column, cell in _cells(line):
            where = f"line {rank + 1}, column {column}"
            step = _read(cell, where, dialect)
            steps.append(step)
            for action in step.actions if isinstance(step, Action | Overlap) else ():
                n_microbatches = max(n_microbatches, action.microbatch + 1)
                if holder.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        "a stage must be run by one rank",
                        got=f"{action} at {where}, whose stage is run by line {holder[action.stage] + 1}",
                        fix="move it to that line",
                    )
        if rank not in holder.values():
            raise ScheduleError(
                "every line must have the actions of one rank",
                got=f"none at line {rank + 1}",
                fix="remove the line",
            )
        ranks.append(steps)
    stages = _stages(holder)
    placement = [tuple(s for s, r in enumerate(stages) if r == rank) for rank in range(len(ranks))]
    kinds = (Action, Overlap, Upkeep) if upkeep else (Action, Overlap)
    actions = [tuple(step for step in steps if isinstance(step, kinds)) for steps in ranks]
    made = Schedule(name, n_microbatches, tuple(placement), tuple(actions), copies=copies)
    if any(isinstance(step, Transfer) for steps in ranks for step in steps) or dialect == "compute_comms":
        check_waits(ranks)
        check_transfers(ranks, stages, copies)
    return made


def _known(dialect: str) -> None:
    if dialect not in _DIALECTS:
        raise ScheduleError(f"dialect must be one of {', '.join(_DIALECTS)}", got=repr(dialect), fix="pass one of them")


def _cells(line: str) -> Iterator[tuple[int, str]]:
    """Yield the cells of a line that are not empty, each with its column, counted from 1."""
    column = 1
    for cell in line.rstrip("\r").split(","):
        inner = cell.strip(" \t")
        if inner:
            yield column + cell.index(inner), inner
        column += len(cell) + 1


def _read(cell: str, where: str, dialect: Dialect | None) -> Instruction:
    """Read one cell, or raise ScheduleError with its position."""
    step: Instruction
    if match := _TRANSFER.fullmatch(cell):
        step = Transfer(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]  # the regex allows only these
    elif (wait := parse_wait(cell)) is not None:
        step = wait
    elif _OLD.fullmatch(cell):
        raise ScheduleError(
            "a whole backward must be written as B",
            got=f"{cell!r} at {where}, of an older torch, in which BW was B and B was I",
            fix="in the whole file, replace B by I and then BW by B",
        )
    else:
        try:
            step = parse_step(cell)
        except ScheduleError as error:
            raise ScheduleError(error.rule, got=f"{error.got} at {where}", fix=error.fix) from None
    if dialect == "compute_only" and not isinstance(step, Action | Overlap):
        raise ScheduleError(
            "compute_only must have F, I, W, B and overlapped pairs only",
            got=f"{cell!r} at {where}",
            fix="read it as compute_comms, or remove it",
        )
    return step


def _stages(holder: dict[int, int]) -> tuple[int, ...]:
    """Return the rank of every stage, in order."""
    missing = next((stage for stage in range(len(holder)) if stage not in holder), None)
    if missing is not None:
        raise ScheduleError(
            "stages must be numbered from 0 without gaps",
            got=f"actions of stage {max(holder)} but none of stage {missing}",
            fix=f"add stage {missing}'s actions, or renumber",
        )
    return tuple(holder[stage] for stage in range(len(holder)))
