"""Where sends and receives go: each transfer at the same position on both of its ranks.

A schedule that passes ``check`` runs if sends do not block. If they do, the naive runtime (send right after the action,
receive right before the action that needs it) hangs even on 1F1B: one rank sends an activation down while the other
sends a gradient up, and neither receives. The remedy is to give each transfer the same position on both sides. Run the
schedule once, in any order in which it can run, and write down each transfer when its sender's action is done, on both
ranks:

    rank 0   0F0 0SEND_F0 0F1 0SEND_F1          0RECV_B0 0B0 ...
    rank 1       1RECV_F0     1RECV_F1 1F0 1B0  1SEND_B0     ...

All actions and transfers now have one order, and each rank's list is a part of it. So when a rank has reached a
transfer, everything before it on the other side can finish without it, and the other side arrives too. No transfer
waits forever, however sends and receives block, in either direction. torch.distributed.pipelining places transfers
the same way. Tests run them with both sides blocking.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep
from sternway.schedule._check import check
from sternway.schedule._depends import feeds, needs, run, step_number
from sternway.schedule._schedule import Schedule

TransferOp: TypeAlias = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
WaitOp: TypeAlias = Literal["WAIT_SEND_F", "WAIT_SEND_B", "WAIT_REDUCE_GRAD"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One side of a transfer, on the stage that sends or that receives: ``0SEND_F1``, ``1RECV_F1``."""

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
class WaitStep:
    """The end of a send or of a reduction: ``0WAIT_SEND_F1``, ``0WAIT_REDUCE_GRAD``; see ``_waits.py``."""

    stage: int
    op: WaitOp
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


Instruction: TypeAlias = Action | Overlap | Transfer | Upkeep | WaitStep


def with_transfers(schedule: Schedule) -> list[list[Instruction]]:
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
    ranks: list[list[Instruction]] = [[] for _ in schedule.actions]
    steps = [iter(row) for row in schedule.actions]
    for rank, _, _ in run(schedule):
        step = next(steps[rank])
        ranks[rank].append(step)
        for action in step.actions:
            send = _send(action, schedule.num_stages, schedule.copies)
            if send is not None and holder[send.other.stage] != rank:
                ranks[rank].append(send)
                ranks[holder[send.other.stage]].append(send.other)
    return ranks


def _send(action: Action, num_stages: int, copies: int) -> Transfer | None:
    """Return the send of what an action computes for another stage, if there is one."""
    if all(target // 3 == action.stage for target in feeds(num_stages, copies)[step_number(action)]):
        return None
    return Transfer(action.stage, "SEND_F" if action.op == "F" else "SEND_B", action.microbatch)


def _receive(action: Action, num_stages: int, copies: int) -> Transfer | None:
    """Return the receive of what an action needs from another stage, if there is one."""
    if all(source // 3 == action.stage for source in needs(num_stages, copies)[step_number(action)]):
        return None
    return Transfer(action.stage, "RECV_F" if action.op == "F" else "RECV_B", action.microbatch)


def check_transfers(ranks: list[list[Instruction]], holder: tuple[int, ...], copies: int = 1) -> None:
    """Check that what other ranks need is sent and received once, in time, and that no rank waits forever.

    Receives block here and sends do not, as in torch's runtime, whose files have them in more than one order.

    Args:
        ranks: each rank's instructions.
        holder: the rank of each stage.
        copies: of the model, each a chain of stages of its own.

    Raises:
        ScheduleError: a transfer is missing, unneeded, too late or stuck, with rank and step.
    """
    at = _places(ranks, holder)
    expected: set[Transfer] = set()
    for rank, steps in enumerate(ranks):
        for index, step in enumerate(steps):
            if isinstance(step, Action | Overlap):
                for action in step.actions:
                    expected |= _check_in_time(action, (rank, index), holder, at, copies)
    for transfer, (rank, index) in at.items():
        where = f"{transfer} (rank {rank}, step {index})"
        if transfer.other not in at:
            raise ScheduleError(
                "a transfer must have two sides",
                got=f"{where} without {transfer.other}",
                fix="add it on the other rank, or remove this one",
            )
        if transfer not in expected:
            raise ScheduleError(
                "a transfer must carry a result to another rank that needs it",
                got=f"{where}, which does not",
                fix="remove it, and its other side",
            )
    _run_blocking(ranks, at)


def _places(ranks: list[list[Instruction]], holder: tuple[int, ...]) -> dict[Transfer, tuple[int, int]]:
    """Return rank and step of every transfer, after checking that each is there once, on the rank of its stage."""
    at: dict[Transfer, tuple[int, int]] = {}
    for rank, steps in enumerate(ranks):
        for index, step in enumerate(steps):
            if not isinstance(step, Transfer):
                continue
            where = f"{step} (rank {rank}, step {index})"
            if step in at:
                raise ScheduleError("a transfer must run once", got=f"{where} again", fix="remove one of them")
            if step.stage >= len(holder) or holder[step.stage] != rank:
                raise ScheduleError(
                    "a transfer must run on the rank of its stage", got=where, fix="move it there, or remove it"
                )
            at[step] = rank, index
    return at


def _check_in_time(
    action: Action, place: tuple[int, int], holder: tuple[int, ...], at: dict[Transfer, tuple[int, int]], copies: int
) -> set[Transfer]:
    """Check that an action's input is received before it and its result sent after it; return both transfers."""
    rank, index = place
    where = f"{action} (rank {rank}, step {index})"
    send, receive = _send(action, len(holder), copies), _receive(action, len(holder), copies)
    found = set()
    if send is not None and holder[send.other.stage] != rank:
        if at.get(send, place) <= place:
            raise ScheduleError(
                "a result that another rank needs must be sent after its action",
                got=f"{where} without {send} after it",
                fix=f"add {send}",
            )
        found.add(send)
    if receive is not None and holder[receive.other.stage] != rank:
        if at.get(receive, place) >= place:
            raise ScheduleError(
                "what an action needs must be received before it",
                got=f"{where} without {receive} before it",
                fix=f"add {receive}",
            )
        found.add(receive)
    return found


def _run_blocking(ranks: list[list[Instruction]], at: dict[Transfer, tuple[int, int]]) -> None:
    """Run all ranks, each blocking at a receive until it is sent; raise ScheduleError if one is stuck."""
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
                "a receive cannot wait for a send that comes after it",
                got=f"{step} (rank {rank}, step {reached[rank]}), which waits for {step.other}, "
                f"while rank {other} waits at {ranks[other][reached[other]]} (step {reached[other]})",
                fix="give each transfer the same position on both ranks, as to_csv('compute_comms') does",
            )
