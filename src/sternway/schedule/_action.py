"""What one rank does at one step: an action, or two of them overlapped.

    F   forward of one microbatch through one stage
    I   backward to the stage's input: the half that the previous stage waits for
    W   backward to the stage's weights: the half that no other stage waits for
    B   the whole backward, I and W in one

A stage whose parameters are sharded over several processes (FSDP) also has, for the stage as a whole,

    UNSHARD      gather its parameters
    REDUCE_GRAD  add its gradients up over those processes, and leave each its shard
    RESHARD      free what was gathered

What F of a microbatch keeps may be away meanwhile, in the host's memory or on a disk:

    OFFLOAD      by now it is gone: it has been copied since F, and later steps wait for that
    RELOAD       it comes back from now on, and its backward waits for that

The text forms are those of torch.distributed.pipelining, so that its files can be read: ``2F0`` is stage 2, forward,
microbatch 0; ``(0F3;7B1)OVERLAP_F_B`` runs two actions at once.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sternway.errors import ScheduleError

Op: TypeAlias = Literal["F", "I", "W", "B"]
"""Forward; backward to the input; backward to the weights; both halves of the backward at once."""

UpkeepOp: TypeAlias = Literal["UNSHARD", "RESHARD", "REDUCE_GRAD", "OFFLOAD", "RELOAD"]
"""Gather a stage's parameters; free them; reduce its gradients; move what F keeps away; bring it back."""

MOVES: tuple[UpkeepOp, ...] = ("OFFLOAD", "RELOAD")
"""Of one microbatch; the others are of the stage as a whole."""

OPS: tuple[Op, ...] = ("F", "I", "W", "B")
_ACTION = re.compile(r"(0|[1-9][0-9]*)([FIWB])(0|[1-9][0-9]*)")
_UPKEEP = re.compile(r"(0|[1-9][0-9]{0,8})(?:(UNSHARD|RESHARD|REDUCE_GRAD)|(OFFLOAD|RELOAD)(0|[1-9][0-9]{0,8}))")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_FORM = "write [stage][F, I, W or B][microbatch], such as 2F0"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One operation of one stage on one microbatch.

    Example:
        >>> str(Action(stage=2, op="F", microbatch=0))
        '2F0'
        >>> Action.parse("2F0")
        Action(stage=2, op='F', microbatch=0)
    """

    stage: int
    op: Op
    microbatch: int

    def __post_init__(self) -> None:
        if type(self.stage) is not int or type(self.microbatch) is not int or not isinstance(self.op, str):
            raise ScheduleError("an action must have a stage, an op and a microbatch", got=repr(self), fix=_FORM)
        if self.op not in OPS:
            raise ScheduleError("an action's op must be F, I, W or B", got=repr(self.op), fix=_FORM)
        if self.stage < 0 or self.microbatch < 0:
            raise ScheduleError("stages and microbatches must be 0 or more", got=str(self), fix=_FORM)

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @property
    def actions(self) -> tuple["Action", ...]:
        """The action itself: a step of a schedule is an action or an ``Overlap``, and both have ``actions``."""
        return (self,)

    @property
    def is_backward(self) -> bool:
        """Whether this sends a gradient to the previous stage: I or B."""
        return self.op == "I" or self.op == "B"

    @staticmethod
    def parse(text: str) -> "Action":
        """Read the text that ``str(action)`` wrote.

        Raises:
            ScheduleError: the text is anything else.
        """
        match = _ACTION.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError("an action must be written as stage, op, microbatch", got=repr(text), fix=_FORM)
        stage, op, microbatch = match.groups()
        if max(len(stage), len(microbatch)) > 9:
            raise ScheduleError("stages and microbatches must have at most nine digits", got=text[:40], fix=_FORM)
        return Action(int(stage), op, int(microbatch))  # type: ignore[arg-type]  # the regex allows only Op


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a whole backward that one rank runs at once; each hides the communication of the other.

    Example:
        >>> pair = Overlap(forward=Action(0, "F", 3), backward=Action(7, "B", 1))
        >>> str(pair)
        '(0F3;7B1)OVERLAP_F_B'
        >>> Overlap.parse(str(pair)) == pair
        True
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.op != "F" or self.backward.op != "B":
            raise ScheduleError(
                "an overlapped pair must be one F and one B, in that order",
                got=str(self),
                fix="pair a forward with a whole backward, such as (0F3;7B1)OVERLAP_F_B",
            )

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def actions(self) -> tuple[Action, ...]:
        """The forward and the backward."""
        return (self.forward, self.backward)

    @staticmethod
    def parse(text: str) -> "Overlap":
        """Read the text that ``str(overlap)`` wrote."""
        match = _OVERLAP.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                "an overlapped pair must be written as (F;B)OVERLAP_F_B",
                got=repr(text),
                fix="write two actions, such as (0F3;7B1)OVERLAP_F_B",
            )
        return Overlap(Action.parse(match[1]), Action.parse(match[2]))


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What is done for a stage beside computing: ``0UNSHARD``, ``0REDUCE_GRAD``; for one microbatch, ``0OFFLOAD3``.

    Example:
        >>> str(Upkeep(stage=2, op="UNSHARD"))
        '2UNSHARD'
        >>> Upkeep.parse("2UNSHARD")
        Upkeep(stage=2, op='UNSHARD', microbatch=None)
        >>> str(Upkeep(stage=2, op="RELOAD", microbatch=5))
        '2RELOAD5'
    """

    stage: int
    op: UpkeepOp
    microbatch: int | None = None

    def __post_init__(self) -> None:
        known = type(self.stage) is int and self.stage >= 0 and self.op in get_args(UpkeepOp)
        numbered = type(self.microbatch) is int and self.microbatch >= 0
        if not known or (numbered if self.op in MOVES else self.microbatch is None) is False:
            raise ScheduleError(
                "upkeep must have a stage, and be UNSHARD, RESHARD or REDUCE_GRAD, or OFFLOAD or RELOAD with a number",
                got=f"{self.stage!r}, {self.op!r}" + ("" if self.microbatch is None else f", {self.microbatch!r}"),
                fix='write Upkeep(2, "UNSHARD") or Upkeep(2, "OFFLOAD", 0)',
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"

    @property
    def actions(self) -> tuple[Action, ...]:
        """None: it computes nothing."""
        return ()

    @staticmethod
    def parse(text: str) -> "Upkeep":
        """Read the text that ``str(upkeep)`` wrote."""
        match = _UPKEEP.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                "upkeep must be written as stage and UNSHARD, RESHARD or REDUCE_GRAD, or OFFLOAD, RELOAD and number",
                got=repr(text),
                fix="write it as 2UNSHARD, or as 2OFFLOAD0",
            )
        number = None if match[4] is None else int(match[4])
        return Upkeep(int(match[1]), match[2] or match[3], number)  # type: ignore[arg-type]  # the regex allows no other


Step: TypeAlias = Action | Overlap | Upkeep
"""What a rank does at one place of its list."""


def parse_step(text: str) -> Step:
    """Read an action, an overlapped pair or upkeep from its text form."""
    if text.endswith(("SHARD", "REDUCE_GRAD")) or "LOAD" in text:
        return Upkeep.parse(text)
    return Overlap.parse(text) if text.startswith("(") else Action.parse(text)
