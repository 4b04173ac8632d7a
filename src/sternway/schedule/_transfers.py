"""Where sends and receives go: each transfer at the same place on both of its ranks.

``_deadlock`` says why that placing never hangs, whether sends and receives block or not.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap
from sternway.schedule._check import check
from sternway.schedule._deadlock import run_order
from sternway.schedule._schedule import Schedule

TransferOp: TypeAlias = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
UpkeepOp: TypeAlias = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One side of a transfer, of the stage that sends or that receives: ``0SEND_F1``, ``1RECV_F1``."""

    stage: int
    op: TransferOp
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @property
    def other(self) -> "Transfer":
        """The other side."""
        sends, what = self.op.startswith("SEND"), self.op[-1]
        up = sends == (what == "F")  # a sent activation and a received gradient have their other side one stage up
        op = f"{'RECV' if sends else 'SEND'}_{what}"
        return Transfer(self.stage + (1 if up else -1), op, self.microbatch)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What torch's runtime does with a stage's parameters and gradients: ``0UNSHARD``, ``0REDUCE_GRAD``."""

    stage: int
    op: UpkeepOp

    def __str__(self) -> str:
        return f"{self.stage}{self.op}"


Step: TypeAlias = Action | Overlap | Transfer | Upkeep


def with_transfers(schedule: Schedule) -> list[list[Step]]:
    """Return each rank's steps with its sends and receives among them.

    Example:
        >>> from sternway import schedule
        >>> s = schedule.make("gpipe", ranks=2, microbatches=1)
        >>> [[str(step) for step in rank] for rank in with_transfers(s)]
        [['0F0', '0SEND_F0', '0RECV_B0', '0B0'], ['1RECV_F0', '1F0', '1B0', '1SEND_B0']]

    Raises:
        ScheduleError: the schedule does not pass ``check``.
    """
    holder = schedule.stage_ranks()
    check(schedule)
    ranks: list[list[Step]] = [[] for _ in schedule.actions]
    for rank, index in run_order(schedule)[0]:
        step = schedule.actions[rank][index]
        ranks[rank].append(step)
        for action in step.actions:
            send = sends(action, schedule.num_stages)
            if send is not None and holder[send.other.stage] != rank:
                ranks[rank].append(send)
                ranks[holder[send.other.stage]].append(send.other)
    return ranks


def sends(action: Action, num_stages: int) -> Transfer | None:
    """Return the send of what an action makes for the stage after or before it, if there is one."""
    if action.op == "F" and action.stage + 1 < num_stages:
        return Transfer(action.stage, "SEND_F", action.microbatch)
    if action.is_backward and action.stage > 0:
        return Transfer(action.stage, "SEND_B", action.microbatch)
    return None


def receives(action: Action, num_stages: int) -> Transfer | None:
    """Return the receive of what an action needs of the stage before or after it, if there is one."""
    if action.op == "F" and action.stage > 0:
        return Transfer(action.stage, "RECV_F", action.microbatch)
    if action.is_backward and action.stage + 1 < num_stages:
        return Transfer(action.stage, "RECV_B", action.microbatch)
    return None


def check_transfers(ranks: list[list[Step]], holder: tuple[int, ...]) -> None:
    """Check that what other ranks need is sent and received once, in time, and that nobody waits for ever.

    Receives block here and sends do not, as in torch's runtime, whose files have them in more than one order.

    Args:
        ranks: each rank's steps.
        holder: the rank of each stage.

    Raises:
        ScheduleError: a transfer that is missing, idle, late or stuck, with rank and step.
    """
    at = _places(ranks, holder)
    expected: set[Transfer] = set()
    for rank, steps in enumerate(ranks):
        for index, step in enumerate(steps):
            if isinstance(step, Action | Overlap):
                for action in step.actions:
                    expected |= _check_in_time(action, (rank, index), holder, at)
    for transfer, (rank, index) in at.items():
        where = f"{transfer} (rank {rank}, step {index})"
        if transfer.other not in at:
            raise ScheduleError(
                "a transfer has two sides",
                got=f"{where} without {transfer.other}",
                fix="add it on the other rank, or remove this one",
            )
        if transfer not in expected:
            raise ScheduleError(
                "a transfer carries what one rank makes to another that needs it",
                got=f"{where}, which does not",
                fix="remove it, and its other side",
            )
    _run_blocking(ranks, at)


def _places(ranks: list[list[Step]], holder: tuple[int, ...]) -> dict[Transfer, tuple[int, int]]:
    """Return rank and step of every transfer: each once, on the rank of its stage."""
    at: dict[Transfer, tuple[int, int]] = {}
    for rank, steps in enumerate(ranks):
        for index, step in enumerate(steps):
            if not isinstance(step, Transfer):
                continue
            where = f"{step} (rank {rank}, step {index})"
            if step in at:
                raise ScheduleError("a transfer runs once", got=f"{where} again", fix="remove one of them")
            if step.stage >= len(holder) or holder[step.stage] != rank:
                raise ScheduleError(
                    "a transfer runs on the rank of its stage", got=where, fix="move it there, or remove it"
                )
            at[step] = rank, index
    return at


def _check_in_time(
    action: Action, place: tuple[int, int], holder: tuple[int, ...], at: dict[Transfer, tuple[int, int]]
) -> set[Transfer]:
    """Check that an action's input is received before it, its result sent after it; return both transfers."""
    rank, index = place
    where = f"{action} (rank {rank}, step {index})"
    send, receive = sends(action, len(holder)), receives(action, len(holder))
    found = set()
    if send is not None and holder[send.other.stage] != rank:
        if at.get(send, place) <= place:
            raise ScheduleError(
                "what another rank needs is sent after it is made",
                got=f"{where} without {send} after it",
                fix=f"add {send}",
            )
        found.add(send)
    if receive is not None and holder[receive.other.stage] != rank:
        if at.get(receive, place) >= place:
            raise ScheduleError(
                "what an action needs is received before it",
                got=f"{where} without {receive} before it",
                fix=f"add {receive}",
            )
        found.add(receive)
    return found


def _run_blocking(ranks: list[list[Step]], at: dict[Transfer, tuple[int, int]]) -> None:
    """Run all ranks, each waiting at a receive until it is sent; say who is stuck, if any."""
    reached = [0] * len(ranks)
    waiting: dict[Transfer, int] = {}
    turns = list(range(len(ranks)))
    while turns:
        rank = turns.pop()
        while reached[rank] < len(ranks[rank]):
            step = ranks[rank][reached[rank]]
            if isinstance(step, Transfer):
                other, index = at[step.other]
                if step.op.startswith("RECV") and reached[other] <= index:
                    waiting[step] = rank
                    break
                if step.other in waiting:
                    turns.append(waiting.pop(step.other))
            reached[rank] += 1
    for rank, steps in enumerate(ranks):
        if reached[rank] < len(steps):
            step = steps[reached[rank]]
            assert isinstance(step, Transfer)
            other, _ = at[step.other]
            raise ScheduleError(
                "a receive waits only for a send that can happen without it",
                got=f"{step} (rank {rank}, step {reached[rank]}), which waits for {step.other}, "
                f"while rank {other} waits at {ranks[other][reached[other]]} (step {reached[other]})",
                fix="give each transfer the same place on both ranks, as to_csv('compute_comms') does",
            )
