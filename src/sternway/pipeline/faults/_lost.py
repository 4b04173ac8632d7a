"""Where a rank is in its work, and which rank was lost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from sternway.errors import LostRankError


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank is: at an action of a stage in a step, after a step, or before the first one."""

    step: int | None = None
    stage: int | None = None
    action: str | None = None

    def __str__(self) -> str:
        if self.step is None:
            return "before the first step"
        if self.action is None:
            return f"after step {self.step}"
        return f"during step {self.step} (stage {self.stage}, at {self.action})"


@dataclass(frozen=True, slots=True)
class LostRank:
    """Which rank was lost (None if that is not known), how that was noticed, and where the rank was.

    Unless ``exact``, that is where it was when it gave its last sign of life. If ``apart``, no rank was lost, but two
    make different calls.
    """

    rank: int | None
    what: str
    position: Position = Position()
    exact: bool = True
    apart: bool = False

    def error(self, here: int) -> LostRankError:
        """The error that rank ``here`` raises about it."""
        if self.apart:
            return LostRankError(
                "all ranks must make the same calls of a pipeline, in the same order",
                got=self.what,
                fix="call it on every rank, not on one alone, and give all ranks as many batches",
            )
        fix = "look at the output of that rank and remove the cause, then resume from the last checkpoint"
        if self.rank is None:
            return LostRankError(f"a rank was lost, as rank {here} noticed", got=self.what, fix=fix)
        where = "" if self.exact else "; its last sign of life was"
        return LostRankError(f"rank {self.rank} was lost{where} {self.position}", got=self.what, fix=fix)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LostRank:
        content = json.loads(text)
        return LostRank(**{**content, "position": Position(**content["position"])})
