"""A pipeline plan as frozen data: which stages each rank holds, and what each rank does, in order.

A schedule has no times. They follow from the order and the costs, and ``simulate`` computes them: one schedule can be
timed with many costs, and two schedules can be compared with the same costs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap, Upkeep
from sternway.schedule._again import Recompute, Share, checked_recompute, shares
from sternway.schedule._costs import Costs, Placement

if TYPE_CHECKING:
    from sternway.schedule._timeline import Timeline

Dialect = Literal["compute_only", "compute_comms"]

MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """What every rank of a pipeline does in one training step.

    Example:
        >>> f, b = Action(0, "F", 0), Action(0, "B", 0)
        >>> s = Schedule(name="mine", n_microbatches=1, placement=((0,),), actions=((f, b),))
        >>> s.ranks, s.num_stages, s.rank_of(0)
        (1, 1, 0)
        >>> s.check() is s
        True
        >>> print(s)
        mine: 1 rank, 1 microbatch, 1 stage
        rank 0: 0F0 0B0

    Args:
        name: the name in tables and drawings.
        n_microbatches: the number of microbatches in a step.
        placement: for each rank, the stages that it holds.
        actions: for each rank, its actions in order; for sharded stages, also their upkeep (see ``sharded``).
        recompute: the stages that keep their inputs alone, and run their forward again at the start of I or B; or such
            as ``(1, 0.5)`` for half of the blocks of stage 1, and ``(1, 0.5, 0.25)`` with a quarter selectively: these
            keep what products, convolutions and attention computed, and do the rest again.
        copies: how often the model is held. With 2, stages 0 to n/2 - 1 are one copy and run the first half of the
            microbatches; stages n/2 to n - 1 are the same layers again, and run the second half.

    Raises:
        ScheduleError: the placement does not hold every stage exactly once, or has another number of ranks than the
            actions, or ``recompute`` has something that is no stage, or the copies cannot share stages and microbatches
            equally. The actions are checked by ``check`` only.
    """

    name: str
    n_microbatches: int
    placement: Placement
    actions: tuple[tuple[Action | Overlap | Upkeep, ...], ...]
    recompute: Recompute = ()
    copies: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(tuple(stages) for stages in self.placement))
        object.__setattr__(self, "actions", tuple(tuple(steps) for steps in self.actions))
        if type(self.n_microbatches) is not int or self.n_microbatches < 1:
            raise ScheduleError(
                "n_microbatches must be at least 1", got=repr(self.n_microbatches), fix="pass 1 or more"
            )
        if len(self.placement) != len(self.actions) or not self.placement:
            raise ScheduleError(
                "placement and actions must have one entry for each rank",
                got=f"{len(self.placement)} in placement, {len(self.actions)} in actions",
                fix="give both the same length, 1 or more",
            )
        check_size(1, self.n_microbatches, sum(map(len, self.placement)))
        held = sorted(stage for stages in self.placement for stage in stages)
        if not held or held != list(range(len(held))):
            raise ScheduleError(
                "a placement must hold every stage exactly once, counted from 0",
                got=str(self.placement),
                fix="give each stage to one rank, without gaps",
            )
        object.__setattr__(self, "recompute", checked_recompute(self.recompute, len(held)))
        copies = self.copies
        if type(copies) is not int or copies < 1 or len(held) % copies or self.n_microbatches % copies:
            raise ScheduleError(
                "copies must be a number from 1 on that divides both stages and microbatches",
                got=f"{copies!r} for {len(held)} stages and {self.n_microbatches} microbatches",
                fix="leave it out, or pass 2 with an even number of both",
            )

    def __repr__(self) -> str:
        from sternway.schedule.formats import describe_size

        return f"<Schedule {describe_size(self)}>"

    def __str__(self) -> str:
        from sternway.schedule.formats import describe_schedule

        return describe_schedule(self)

    def _repr_html_(self) -> str | None:
        try:
            return self.simulate().to_svg()
        except ScheduleError:  # it cannot run: a notebook then shows the text
            return None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.placement)

    @property
    def num_stages(self) -> int:
        """The number of stages, over all ranks."""
        return sum(len(stages) for stages in self.placement)

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages that one rank holds."""
        return max(len(stages) for stages in self.placement)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds ``stage``."""
        for rank, stages in enumerate(self.placement):
            if stage in stages:
                return rank
        raise ScheduleError(
            f"stage must be 0 to {self.num_stages - 1}", got=str(stage), fix="pass a stage that the schedule has"
        )

    def runs(self, stage: int, microbatch: int) -> bool:
        """Return whether a stage runs a microbatch: every one, or those of its copy of the model."""
        return stage * self.copies // self.num_stages == microbatch * self.copies // self.n_microbatches

    def moved(self, rank: int) -> frozenset[tuple[int, int]]:
        """Return (stage, microbatch) of what a rank offloads."""
        moves = (step for step in self.actions[rank] if isinstance(step, Upkeep) and step.op == "OFFLOAD")
        return frozenset((step.stage, step.microbatch) for step in moves if step.microbatch is not None)

    @property
    def gathered(self) -> frozenset[int]:
        """The stages that are gathered: those whose parameters are sharded."""
        upkeep = (step for steps in self.actions for step in steps if isinstance(step, Upkeep))
        return frozenset(step.stage for step in upkeep if step.op == "UNSHARD")

    @property
    def shares(self) -> dict[int, Share]:
        """The share of each stage that is recomputed, of those of which something is."""
        return shares(self.recompute)

    def runs_again(self, step: Action | Overlap | Upkeep) -> bool:
        """Return whether a step runs a forward again: I or B of a stage of which some is recomputed."""
        return any(action.is_backward and action.stage in self.shares for action in step.actions)

    def stage_ranks(self) -> tuple[int, ...]:
        """Return the rank of every stage, in order."""
        return stage_ranks(self.placement)

    def check(self, memory_limit: float | Sequence[float] | None = None, costs: Costs | None = None) -> "Schedule":
        """Return this schedule if it can run, or raise ScheduleError; see ``sternway.schedule.check``."""
        from sternway.schedule._check import check

        return check(self, memory_limit=memory_limit, costs=costs)

    def simulate(self, costs: Costs = Costs()) -> "Timeline":  # noqa: B008 - frozen, so safely shared
        """Return when every action runs with these costs; see ``sternway.schedule.simulate``."""
        from sternway.schedule._simulate import simulate

        return simulate(self, costs)

    def to_csv(self, dialect: Dialect = "compute_only", *, waits: bool = False) -> str:
        """Return the CSV of torch.distributed.pipelining, one line for each rank; ``from_csv`` reads it back.

        Args:
            dialect: ``compute_only``, or ``compute_comms`` for sends and receives too.
            waits: for ``compute_comms``, whether to say where sends and reductions end. torch 2.15 cannot read a file
                without that, and torch before 2.15 none with it.
        """
        from sternway.schedule.formats import to_csv

        return to_csv(self, dialect, waits=waits)

    def to_json(self) -> str:
        """Return JSON text; ``from_json`` reads it back."""
        from sternway.schedule.formats import to_json

        return to_json(self)

    def draw(self, costs: Costs = Costs(), *, color: bool = False, width: int | None = None) -> str:  # noqa: B008
        """Return a drawing for a terminal: one line for each rank, time to the right."""
        return self.simulate(costs).draw(color=color, width=width)


def check_size(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    """Raise ScheduleError for a schedule that would not fit in memory: an action takes about a hundred bytes."""
    if ranks * stages_per_rank * microbatches > MAX_SIZE:
        raise ScheduleError(
            f"a schedule cannot have more than {MAX_SIZE:,} stages times microbatches",
            got=f"{ranks} ranks of {stages_per_rank} stages with {microbatches} microbatches",
            fix="plan one pipeline of the machine; its copies run the same schedule",
        )


def checked_stages(name: str, stages: object, count: int) -> tuple[int, ...]:
    """Return some of ``count`` stages in order, each once, or raise ScheduleError."""
    found = tuple(stages) if isinstance(stages, Iterable) else (None,)
    if not all(type(stage) is int and 0 <= stage < count for stage in found):
        raise ScheduleError(
            f"{name} must be stages, numbers from 0 to {count - 1}", got=repr(stages), fix=f"pass {name}=[0]"
        )
    return tuple(sorted(set(found)))


def stage_ranks(placement: Placement) -> tuple[int, ...]:
    """Return the rank of every stage, in order."""
    held = sorted((stage, rank) for rank, stages in enumerate(placement) for stage in stages)
    return tuple(rank for _, rank in held)


def looped_placement(ranks: int, stages_per_rank: int = 1) -> Placement:
    """Place stages in turn, so that rank r holds r, r + ranks, r + 2 ranks, ..."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def v_placement(ranks: int) -> Placement:
    """Place stages down the ranks and up again: rank r holds stages r and 2 * ranks - 1 - r."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
