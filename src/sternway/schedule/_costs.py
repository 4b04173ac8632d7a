"""How long each action takes and how much memory it keeps.

A cost is for ONE microbatch through ONE rank's whole share of the model, so that schedules with one stage per rank and
with several compare on the same work: each of a rank's v stages costs 1/v; with c copies of the model c/v, since a
microbatch goes through one of them. For unequal stages, pass one number for each stage; those are used unchanged.

Memory is in units of what one microbatch's forward keeps on one rank. For each of a rank's v stages,

    F adds 1/v,    I leaves memory_after_I/v,    W (or B) leaves 0,    a gathered stage adds memory_gathered/v.

A stage that is recomputed (``Schedule.recompute``) keeps its input alone, and runs its forward again in I or B:

    F adds memory_input/v,    I and B take F longer, and need memory_again/v while they run,    I leaves the same.

If it is a share of the stage that is recomputed, some of its ``blocks``, F keeps so much less, and I and B take so much
longer. Of blocks that are recomputed selectively, F keeps ``memory_selective``, and I and B take ``selective`` longer.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sternway._bytes import parse_bytes, show_bytes
from sternway.errors import ScheduleError
from sternway.schedule._again import Again, Share, levels
from sternway.schedule._again import shares as shares_of
from sternway.schedule._stage_costs import StageCosts

Placement: TypeAlias = tuple[tuple[int, ...], ...]

_PER_STAGE = (
    "F",
    "I",
    "W",
    "B",
    "gather",
    "reduce",
    "offload",
    "overlap",
    "selective",
    "memory_after_F",
    "memory_after_I",
    "memory_input",
    "memory_again",
    "memory_offloaded",
    "memory_gathered",
    "memory_selective",
)
_OPTIONAL = "B", "memory_again", "selective", "memory_selective"
_CHEAP = 0.2  # of a forward, that its cheap operations take unless that is known

EPSILON = 1e-9
"""Amounts of memory, and times as fractions of a rank's work, count as equal if they differ by no more: rounding."""


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
        comm: from the end of an action until another rank has its result: one number, or ``comm[a][b]`` for each pair
            of ranks, from a to b. Within a rank this takes no time.
        comm_busy: for which share of ``comm`` a message keeps the way from one rank to another busy, from 0 to 1: the
            time of its bytes; the rest is the way's length. The next message there sets out when that is over.
        turn: time of a rank between two steps: to cut the batch, collect the loss, run the optimizer. Counts in
            ``Timeline.period``.
        overhead: time of a rank for each action beyond what it computes, such as Python's. Two stages of a rank have
            twice as many actions as one.
        receive: time of a rank to take a message from another one, before the action that needs it; none within a rank.
        spread: how much the times of equal actions differ: their standard deviation, as a share of the mean. Counts in
            ``Timeline.period``, which is longer where some rank is always late.
        memory_after_I: what is still kept between I and W, of what F kept; one number, or one for each stage.
        activation_bytes: what one microbatch's forward keeps on one rank, the unit of memory, in bytes; 0 if unknown.
        static_bytes: what a rank holds anyway, in bytes: parameters, their gradients, the optimizer's state.
        gather: time to gather a rank's sharded parameters; one number, or one for each stage. Beside computation.
        reduce: time to reduce the gradients of sharded parameters; one number, or one for each stage.
        offload: time to move what F of a microbatch keeps on a rank to the host, or back; one number, or one for each
            stage. Beside computation, one at a time in each direction.
        overlap: what an overlapped F and B take together, as a share of F + B: below 1 where each hides messages inside
            the other, such as those of experts. One number, or one for each stage, that of the F.
        memory_gathered: what a rank's gathered parameters take, in what one microbatch's forward keeps; one number, or
            one for each stage.
        memory_after_F: what F keeps, in units of memory; pass one number for each stage if stages are not equal.
        memory_input: what F of a recomputed stage keeps, in units; one number, or one for each stage.
        memory_again: what a recomputed stage takes while its backward runs, ``memory_input`` included; what F keeps
            otherwise, unless given. One number, or one for each stage.
        memory_offloaded: what stays on the rank of a microbatch that is offloaded, in units; one number, or one for
            each stage.
        selective: how much longer a backward takes if all blocks of a stage are recomputed selectively: one number, or
            one for each stage. A fifth of F unless given.
        memory_selective: what F of such a stage keeps, in units; one number, or one for each stage. A search recomputes
            selectively only if this is given, and if that frees more in its time than whole blocks would.
        blocks: of how many equal blocks a stage consists, of which a search may recompute some; one number, or one for
            each stage. With 1, it recomputes all of a stage or nothing; with 0, nothing.

    Raises:
        ScheduleError: a cost is negative or not finite, or sequences have different lengths.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741 - the paper's letter
    W: float | Sequence[float] = 1.0
    comm: float | Sequence[Sequence[float]] = 0.0
    memory_after_I: float | Sequence[float] = 1.0  # noqa: N815 - the paper's letter
    B: float | Sequence[float] | None = None
    activation_bytes: float = 0.0
    static_bytes: float = 0.0
    gather: float | Sequence[float] = 0.0
    reduce: float | Sequence[float] = 0.0
    memory_gathered: float | Sequence[float] = 0.0
    memory_after_F: float | Sequence[float] = 1.0  # noqa: N815 - the paper's letter
    memory_input: float | Sequence[float] = 0.0
    memory_again: float | Sequence[float] | None = None
    offload: float | Sequence[float] = 0.0
    memory_offloaded: float | Sequence[float] = 0.0
    overlap: float | Sequence[float] = 1.0
    blocks: int | Sequence[int] = 1
    turn: float = 0.0
    overhead: float = 0.0
    spread: float = 0.0
    selective: float | Sequence[float] | None = None
    memory_selective: float | Sequence[float] | None = None
    comm_busy: float = 0.0
    receive: float = 0.0

    def __post_init__(self) -> None:
        lengths: dict[str, int] = {}
        for name in _PER_STAGE:
            if getattr(self, name) is None and name in _OPTIONAL:
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
        for name in ("turn", "overhead", "receive", "spread", "activation_bytes", "static_bytes"):
            object.__setattr__(self, name, _amount(name, getattr(self, name)))
        object.__setattr__(self, "comm", _between(self.comm))
        object.__setattr__(self, "comm_busy", _amount("comm_busy", self.comm_busy))
        if self.comm_busy > 1:
            raise ScheduleError(
                "comm_busy must be a share of comm, from 0 to 1",
                got=f"comm_busy={self.comm_busy:g}",
                fix="pass the time of a message's bytes over that of the message",
            )
        blocks = tuple(self.blocks) if isinstance(self.blocks, Sequence) else (self.blocks,)
        if not all(type(count) is int and count >= 0 for count in blocks):
            raise ScheduleError(
                "blocks must be whole numbers from 0 on", got=f"blocks={self.blocks!r}", fix="pass 1 or more"
            )
        if isinstance(self.blocks, Sequence):
            object.__setattr__(self, "blocks", blocks)

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
        least = self.static_bytes + self.smallest() * self.activation_bytes
        if size < least * (1 - EPSILON):
            raise ScheduleError(
                "the memory of a rank must be large enough for what it holds anyway and one microbatch",
                got=f"{show_bytes(size)}; it holds {show_bytes(self.static_bytes)} anyway, and a microbatch takes "
                f"{show_bytes(least - self.static_bytes)}",
                fix=f"give it {show_bytes(least)} or more, make microbatches smaller, or use more ranks",
            )
        return (size - self.static_bytes) / self.activation_bytes

    def memory_alone(self) -> "Costs":
        """Return costs with this memory, and times of 1."""
        names = [name for name in self.__dataclass_fields__ if name.startswith("memory") or name.endswith("bytes")]
        return Costs(**{name: getattr(self, name) for name in names})

    def smallest(self) -> float:
        """Return what one microbatch takes on a rank, in units; with one number for each stage, on the emptiest.

        Its backward may be a whole one, so that what I leaves does not count.
        """
        kept = self.memory_after_F
        return min(kept) if isinstance(kept, Sequence) else kept

    def _hops(self, ranks: int) -> tuple[tuple[float, ...], ...]:
        """Return the time of a message from each rank to each."""
        if not isinstance(self.comm, Sequence):
            return tuple(tuple(0.0 if a == b else self.comm for b in range(ranks)) for a in range(ranks))
        if len(self.comm) != ranks:
            raise ScheduleError(
                f"comm must have one row for each of the {ranks} ranks",
                got=f"{len(self.comm)}",
                fix=f"pass {ranks} rows of {ranks} numbers, or one number for all",
            )
        return tuple(tuple(0.0 if a == b else time for b, time in enumerate(row)) for a, row in enumerate(self.comm))

    def _received(self, placement: Placement, copies: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what each stage's rank takes to receive what comes from the stage before, and from the one after."""
        rank_of = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
        count = len(rank_of) // copies

        def taken(stage: int, other: int) -> float:
            inside = 0 <= other < len(rank_of) and other // count == stage // count
            return self.receive if inside and rank_of[other] != rank_of[stage] else 0.0

        stages = range(len(rank_of))
        return tuple(taken(stage, stage - 1) for stage in stages), tuple(taken(stage, stage + 1) for stage in stages)

    def levels(self, num_stages: int) -> tuple[tuple[Share, ...], ...]:
        """Return for each of so many stages the shares that a search may recompute, at most six: some of its blocks.

        Example:
            >>> [[share.whole for share in each] for each in Costs(blocks=(1, 2, 8)).levels(3)]
            [[1.0], [0.5, 1.0], [0.25, 0.5, 0.75, 1.0]]

        Raises:
            ScheduleError: there are numbers for another number of stages.
        """
        blocks = self.blocks if isinstance(self.blocks, Sequence) else (self.blocks,) * num_stages
        for name, each in (("blocks", blocks), ("memory_selective", self.memory_selective), ("F", self.F)):
            if isinstance(each, Sequence) and len(each) != num_stages:
                raise ScheduleError(
                    f"{name} must have one number for each of the {num_stages} stages",
                    got=f"{len(each)}",
                    fix=f"pass {num_stages} numbers, or one number for all",
                )
        return tuple(levels(count, selective=self._frees_cheaply(stage)) for stage, count in enumerate(blocks))

    def _frees_cheaply(self, stage: int) -> bool:
        """Return whether a stage that is recomputed selectively frees more in its time than one that runs again."""
        if self.memory_selective is None:
            return False
        amounts = self.F, self.memory_after_F, self.memory_input, self.memory_selective
        f, kept, small, rest = (each[stage] if isinstance(each, Sequence) else each for each in amounts)
        time = self.selective[stage] if isinstance(self.selective, Sequence) else self.selective
        return (kept - rest) * f > max(0.0, kept - small) * (_CHEAP * f if time is None else time) + EPSILON

    def per_stage(self, placement: Placement, recompute: Collection[Again] = (), copies: int = 1) -> StageCosts:
        """Return one number for each stage of ``placement``, of which those in ``recompute`` are recomputed.

        If the ranks hold several copies of the model, a microbatch goes through the stages of one of them.

        Example:
            >>> Costs(memory_input=0.25).per_stage(((0,), (1,)), recompute=[0]).B
            (3.0, 2.0)

        Raises:
            ScheduleError: a sequence of costs is not as long as there are stages.
        """
        held = {stage: len(stages) for stages in placement for stage in stages}
        shares = [copies / held[stage] for stage in range(len(held))]

        def resolve(name: str) -> tuple[float, ...]:
            value = getattr(self, name)
            if not isinstance(value, Sequence):
                return tuple(value if name == "overlap" else value * share for share in shares)
            if len(value) != len(shares):
                raise ScheduleError(
                    f"per-stage costs must have one number for each of the {len(shares)} stages",
                    got=f"{len(value)} for {name}",
                    fix=f"pass {len(shares)} numbers, or one number for a rank's whole share",
                )
            return tuple(value)

        f, i, w = resolve("F"), resolve("I"), resolve("W")
        b = tuple(map(sum, zip(i, w, strict=True))) if self.B is None else resolve("B")
        there, back = self._received(placement, copies)
        received = there, back, (0.0,) * len(shares), back
        whole = [
            tuple(time + self.overhead + more for time, more in zip(times, taken, strict=True))
            for times, taken in zip((f, i, w, b), received, strict=True)
        ]
        plain = StageCosts(
            F=whole[0],
            I=whole[1],
            W=whole[2],
            B=whole[3],
            comm=self._hops(len(placement)),
            comm_busy=self.comm_busy,
            keeps=resolve("memory_after_F"),
            keeps_after_i=resolve("memory_after_I"),
            works=(0.0,) * len(shares),
            gather=resolve("gather"),
            reduce=resolve("reduce"),
            gathered=resolve("memory_gathered"),
            offload=resolve("offload"),
            away=resolve("memory_offloaded"),
            overlap=resolve("overlap"),
            selective=tuple(_CHEAP * time for time in f) if self.selective is None else resolve("selective"),
        )
        if not recompute:
            return plain
        again = plain.keeps if self.memory_again is None else resolve("memory_again")
        cheap = plain.keeps if self.memory_selective is None else resolve("memory_selective")
        return plain.recomputed(shares_of(recompute), resolve("memory_input"), again, cheap)


def _between(comm: object) -> float | tuple[tuple[float, ...], ...]:
    """Return the time of a message, or a tuple of tuples of one for each pair of ranks."""
    if isinstance(comm, str | bytes) or not isinstance(comm, Sequence):
        return _amount("comm", comm)
    rows = tuple(_frozen(f"comm[{a}]", row) for a, row in enumerate(comm))
    table = tuple(row for row in rows if isinstance(row, tuple) and len(row) == len(rows))
    if not rows or len(table) < len(rows):
        raise ScheduleError(
            "comm must be one number, or as many rows as there are ranks with as many numbers each",
            got=f"comm={comm!r}",
            fix="pass comm[a][b] for the time from rank a to rank b, 0 where they are the same",
        )
    return table


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
