"""How long each action takes and how much memory it keeps.

A cost is for ONE microbatch through ONE rank's whole share of the model, so that schedules with one stage per rank and
with several compare on the same work: each of a rank's v stages costs 1/v. For unequal stages, pass one number for each
stage; those are used unchanged.

Memory is in units of what one microbatch's forward keeps on one rank. For each of a rank's v stages,

    F adds 1/v,    I leaves memory_after_I/v,    W (or B) leaves 0,    a gathered stage adds memory_gathered/v.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sternway._bytes import parse_bytes, show_bytes
from sternway.errors import ScheduleError

Placement: TypeAlias = tuple[tuple[int, ...], ...]

EPSILON = 1e-9
"""Amounts of memory, and times as fractions of a rank's work, count as equal if they differ by no more: rounding."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs for one placement: one number for each stage.

    ``keeps[s]`` is what F of stage s adds to its rank's memory, ``keeps_after_i[s]`` what I leaves of it.
    """

    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741 - the paper's letter
    W: tuple[float, ...]
    B: tuple[float, ...]
    comm: float
    keeps: tuple[float, ...]
    keeps_after_i: tuple[float, ...]
    gather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()

    def of(self, op: str, stage: int) -> float:
        """Return the time that ``op`` of ``stage`` takes."""
        times: tuple[float, ...] = getattr(self, op)
        return times[stage]

    def joined(self) -> "StageCosts":
        """Return costs in which I and W together take no longer than B."""
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
        >>> costs.per_stage(((0, 3), (1, 2))).F          # two stages per rank: each costs half
        (1.0, 1.0, 1.0, 1.0)
        >>> Costs(F=[1.0, 3.0]).per_stage(((0,), (1,))).F     # unequal stages: one number each, used unchanged
        (1.0, 3.0)

    Args:
        F: time of a forward; one number, or one for each stage.
        I: time of a backward to the input; one number, or one for each stage.
        W: time of a backward to the weights; one number, or one for each stage.
        B: time of a whole backward; one number, or one for each stage. I + W unless given; one call may cost less.
        comm: from the end of an action until another rank has its result. Within a rank this takes no time.
        memory_after_I: the fraction of what F kept that is still kept between I and W.
        activation_bytes: what one microbatch's forward keeps on one rank, the unit of memory, in bytes; 0 if unknown.
        static_bytes: what a rank holds anyway, in bytes: parameters, their gradients, the optimizer's state.
        gather: time to gather a rank's sharded parameters; one number, or one for each stage. Beside computation.
        reduce: time to reduce the gradients of sharded parameters; one number, or one for each stage.
        memory_gathered: what a rank's gathered parameters take, in what one microbatch's forward keeps.

    Raises:
        ScheduleError: a cost is negative or not finite, or sequences have different lengths.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741 - the paper's letter
    W: float | Sequence[float] = 1.0
    comm: float = 0.0
    memory_after_I: float = 1.0  # noqa: N815 - the paper's letter
    B: float | Sequence[float] | None = None
    activation_bytes: float = 0.0
    static_bytes: float = 0.0
    gather: float | Sequence[float] = 0.0
    reduce: float | Sequence[float] = 0.0
    memory_gathered: float = 0.0

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for name in ("F", "I", "W", "B", "gather", "reduce"):
            if getattr(self, name) is None and name == "B":
                continue
            value = _frozen(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if isinstance(value, tuple):
                lengths[name] = len(value)
        if len(set(lengths.values())) > 1:
            raise ScheduleError(
                "per-stage costs must have one number for each stage",
                got=", ".join(f"{n} for {name}" for name, n in lengths.items()),
                fix="pass sequences as long as there are stages",
            )
        for name in ("comm", "memory_after_I", "activation_bytes", "static_bytes", "memory_gathered"):
            object.__setattr__(self, name, _amount(name, getattr(self, name)))

    def bytes_of(self, memory: float) -> float | None:
        """Return what a rank holds in bytes, beside ``memory`` in units; None where ``activation_bytes`` is unknown.

        Example:
            >>> Costs(activation_bytes=2e9, static_bytes=5e9).bytes_of(4)
            13000000000.0
        """
        return self.static_bytes + memory * self.activation_bytes if self.activation_bytes else None

    def limit_within(self, memory: int | str) -> float:
        """Return the memory limit, in units, of a rank that has ``memory`` bytes, such as "40GB".

        Example:
            >>> Costs(activation_bytes=2e9, static_bytes=5e9).limit_within("13GB")
            4.0

        Raises:
            ScheduleError: ``activation_bytes`` is unknown, or not even one microbatch fits.
        """
        if not self.activation_bytes:
            raise ScheduleError(
                "a memory limit in bytes needs the bytes that a microbatch keeps",
                got=f"memory={memory!r} and costs without activation_bytes",
                fix="pass Costs(activation_bytes=…), on the command line --activations; sternway fit shows them",
            )
        size = parse_bytes(memory, "memory", ScheduleError)
        least = self.static_bytes + max(1.0, self.memory_after_I) * self.activation_bytes
        if size < least * (1 - EPSILON):
            raise ScheduleError(
                "the memory of a rank must be large enough for what it holds anyway and one microbatch",
                got=f"{show_bytes(size)}; it holds {show_bytes(self.static_bytes)} anyway, and a microbatch takes "
                f"{show_bytes(least - self.static_bytes)}",
                fix=f"give it {show_bytes(least)} or more, make microbatches smaller, or use more ranks",
            )
        return (size - self.static_bytes) / self.activation_bytes

    def per_stage(self, placement: Placement) -> StageCosts:
        """Return one number for each stage of ``placement``.

        Raises:
            ScheduleError: a sequence of costs is not as long as there are stages.
        """
        held = {stage: len(stages) for stages in placement for stage in stages}
        shares = [1.0 / held[stage] for stage in range(len(held))]

        def resolve(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
            if not isinstance(value, Sequence):
                return tuple(value * share for share in shares)
            if len(value) != len(shares):
                raise ScheduleError(
                    f"per-stage costs must have one number for each of the {len(shares)} stages",
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
            gather=resolve("gather", self.gather),
            reduce=resolve("reduce", self.reduce),
        )


def _amount(name: str, value: object) -> float:
    """Return a cost as a float, or raise ScheduleError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScheduleError(
            "a cost must be a number", got=f"{name}={value!r}", fix="pass a float, such as a measured time"
        )
    if not math.isfinite(value) or value < 0:
        raise ScheduleError("a cost must be finite and not negative", got=f"{name}={value!r}", fix="measure it again")
    return float(value)


def _frozen(name: str, value: object) -> float | tuple[float, ...]:
    """Return one cost, or a tuple of one for each stage."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return _amount(name, value)
    if not value:
        raise ScheduleError(
            "per-stage costs must have one number for each stage",
            got=f"none for {name}",
            fix="leave it out, or pass numbers",
        )
    return tuple(_amount(f"{name}[{i}]", item) for i, item in enumerate(value))
