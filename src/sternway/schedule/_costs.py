"""How long each action takes and how much it keeps: the measured side of a plan.

A cost is for ONE microbatch through ONE rank's whole share of the model, so that schedules with one stage a
rank and with several compare on the same work: of a rank's v stages, each costs 1/v. Stages that are
not equal are given one number each, and those are used as they are.

Memory is in units of what one microbatch's forward keeps on one rank. Of a rank's v stages, each

    F  adds 1/v          I  leaves memory_after_I/v          W  (or B)  leaves 0
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sternway.errors import ScheduleError

Placement: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs resolved for a placement: one number for each stage.

    ``keeps[s]`` is what F of stage s adds to its rank's memory, ``keeps_after_i[s]`` what I leaves of it.
    """

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 - the paper's letter
    W: tuple[float, ...]
    B: tuple[float, ...]
    comm: float
    keeps: tuple[float, ...]
    keeps_after_i: tuple[float, ...]

    def of(self, op: str, stage: int) -> float:
        """Return the time that ``op`` of ``stage`` takes."""
        if op == "F":
            return self.F[stage]
        if op == "I":
            return self.I[stage]
        return self.W[stage] if op == "W" else self.B[stage]

    def joined(self) -> "StageCosts":
        """Return costs at which I and W, apart, take together what B does, wherever that is less."""
        i, w = [], []
        for apart_i, apart_w, b in zip(self.I, self.W, self.B, strict=True):
            gains = b < apart_i + apart_w
            i.append(min(apart_i, b) if gains else apart_i)
            w.append(b - i[-1] if gains else apart_w)
        return replace(self, I=tuple(i), W=tuple(w))


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and memory of F, I and W, for one microbatch through one rank's whole share of the model.

    Example:
        >>> costs = Costs(F=2.0, I=2.0, W=1.0, comm=0.1)
        >>> costs.per_stage(((0, 3), (1, 2))).F          # two stages a rank: each costs half
        (1.0, 1.0, 1.0, 1.0)
        >>> Costs(F=[1.0, 3.0]).per_stage(((0,), (1,))).F     # uneven stages: one number each, used as it is
        (1.0, 3.0)

    Args:
        F: forward; one number, or one for each stage.
        I: backward to the input; likewise.
        W: backward to the weights; likewise.
        B: a whole backward; likewise. I + W, unless given: in one piece it may cost less.
        comm: from the end of an action to its result's arrival at another rank. Nothing within a rank.
        memory_after_I: what I leaves of what F kept, until W: 1 is all of it, 0 nothing.

    Raises:
        ScheduleError: a cost that is negative or not finite, or sequences of different lengths.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741 - the paper's letter
    W: float | Sequence[float] = 1.0
    comm: float = 0.0
    memory_after_I: float = 1.0  # noqa: N815 - the paper's letter
    B: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for name in ("F", "I", "W", "B"):
            if getattr(self, name) is None and name == "B":
                continue
            value = _frozen(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if isinstance(value, tuple):
                lengths[name] = len(value)
        if len(set(lengths.values())) > 1:
            raise ScheduleError(
                "per-stage costs give one number for each stage",
                got=", ".join(f"{n} for {name}" for name, n in lengths.items()),
                fix="give sequences of one length, the number of stages",
            )
        object.__setattr__(self, "comm", _amount("comm", self.comm))
        object.__setattr__(self, "memory_after_I", _amount("memory_after_I", self.memory_after_I))

    def per_stage(self, placement: Placement) -> StageCosts:
        """Resolve to one number for each stage of ``placement``.

        Raises:
            ScheduleError: a per-stage sequence that is not as long as there are stages.
        """
        held = {stage: len(stages) for stages in placement for stage in stages}
        shares = [1.0 / held[stage] for stage in range(len(held))]

        def resolve(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
            if not isinstance(value, Sequence):
                return tuple(value * share for share in shares)
            if len(value) != len(shares):
                raise ScheduleError(
                    f"per-stage costs give one number for each of the {len(shares)} stages",
                    got=f"{len(value)} for {name}",
                    fix=f"pass {len(shares)} numbers, or one number for a rank's whole share",
                )
            return tuple(value)

        i, w = resolve("I", self.I), resolve("W", self.W)
        return StageCosts(
            F=resolve("F", self.F),
            I=i,
            W=w,
            B=tuple(map(sum, zip(i, w, strict=True))) if self.B is None else resolve("B", self.B),
            comm=self.comm,
            keeps=tuple(shares),
            keeps_after_i=tuple(self.memory_after_I * share for share in shares),
        )


def _amount(name: str, value: object) -> float:
    """Return a cost as a float, or say why it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScheduleError("a cost is a number", got=f"{name}={value!r}", fix="pass a float, such as a measured time")
    if not math.isfinite(value) or value < 0:
        raise ScheduleError("a cost is finite and not negative", got=f"{name}={value!r}", fix="measure it again")
    return float(value)


def _frozen(name: str, value: object) -> float | tuple[float, ...]:
    """Return one cost, or one for each stage, as frozen data."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return _amount(name, value)
    if not value:
        raise ScheduleError(
            "per-stage costs give one number for each stage",
            got=f"none for {name}",
            fix="leave it out, or pass numbers",
        )
    return tuple(_amount(f"{name}[{i}]", item) for i, item in enumerate(value))
