"""A pipeline plan as frozen data: who holds which stage, and what each rank does, in order.

There are no times and no gaps in it. An order and the costs decide the times, which is what ``simulate``
computes; so one plan can be timed under many costs, and two plans compared under the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sternway.errors import ScheduleError
from sternway.schedule._action import Action, Overlap
from sternway.schedule._costs import Costs, Placement

if TYPE_CHECKING:
    from sternway.schedule._timeline import Timeline

Dialect = Literal["compute_only", "compute_comms"]


MOST = 2**24


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank of a pipeline does for one training step.

    Example:
        >>> f, b = Action(0, "F", 0), Action(0, "B", 0)
        >>> s = Schedule(name="mine", n_microbatches=1, placement=((0,),), actions=((f, b),))
        >>> s.ranks, s.num_stages, s.rank_of(0)
        (1, 1, 0)
        >>> s.check() is s
        True

    Args:
        name: what to call it in tables and drawings.
        n_microbatches: how many microbatches a step has.
        placement: the stages that each rank holds.
        actions: for each rank, its actions in order.

    Raises:
        ScheduleError: a placement that does not hold every stage exactly once, or that has another number of
            ranks than the actions. Whether the actions make sense is for ``check`` to say.
    """

    name: str
    n_microbatches: int
    placement: Placement
    actions: tuple[tuple[Action | Overlap, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(tuple(stages) for stages in self.placement))
        object.__setattr__(self, "actions", tuple(tuple(steps) for steps in self.actions))
        if type(self.n_microbatches) is not int or self.n_microbatches < 1:
            raise ScheduleError(
                "a schedule has at least one microbatch", got=str(self.n_microbatches), fix="pass 1 or more"
            )
        if len(self.placement) != len(self.actions) or not self.placement:
            raise ScheduleError(
                "placement and actions have one entry for each rank",
                got=f"{len(self.placement)} ranks placed, {len(self.actions)} with actions",
                fix="give both the same, nonzero length",
            )
        check_size(1, self.n_microbatches, sum(map(len, self.placement)))
        held = sorted(stage for stages in self.placement for stage in stages)
        if not held or held != list(range(len(held))):
            raise ScheduleError(
                "a placement holds every stage exactly once, counted from 0",
                got=str(self.placement),
                fix="give each stage to one rank, without gaps",
            )

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
            f"stages count from 0 to {self.num_stages - 1}", got=f"stage {stage}", fix="ask for one of those"
        )

    def stage_ranks(self) -> tuple[int, ...]:
        """Return the rank of every stage at once: the table that ``rank_of`` looks into."""
        table = [0] * self.num_stages
        for rank, stages in enumerate(self.placement):
            for stage in stages:
                table[stage] = rank
        return tuple(table)

    def check(self, memory_limit: float | None = None, costs: Costs | None = None) -> "Schedule":
        """Return this schedule if every rank can run it to the end; see ``sternway.schedule.check``."""
        from sternway.schedule._check import check

        return check(self, memory_limit=memory_limit, costs=costs)

    def simulate(self, costs: Costs = Costs()) -> "Timeline":  # noqa: B008 - frozen, so safely shared
        """Return when every action runs under these costs; see ``sternway.schedule.simulate``."""
        from sternway.schedule._simulate import simulate

        return simulate(self, costs)

    def to_csv(self, dialect: Dialect = "compute_only") -> str:
        """Return it as torch's CSV, one line for each rank; ``from_csv`` reads it back."""
        from sternway.schedule._csv import to_csv

        return to_csv(self, dialect)

    def to_json(self) -> str:
        """Return it as JSON text; ``from_json`` reads it back."""
        from sternway.schedule._json import to_json

        return to_json(self)

    def draw(self, costs: Costs = Costs(), *, color: bool = False, width: int | None = None) -> str:  # noqa: B008
        """Return a drawing for a terminal: one line for each rank, time to the right."""
        from sternway.schedule._draw import draw

        return draw(self.simulate(costs), color=color, width=width)


def check_size(ranks: int, microbatches: int, stages_per_rank: int) -> None:
    """Raise ScheduleError for a plan that no memory holds: an action takes about a hundred bytes."""
    if ranks * stages_per_rank * microbatches > MOST:
        raise ScheduleError(
            f"a plan has at most {MOST:,} stages times microbatches",
            got=f"{ranks} ranks of {stages_per_rank} with {microbatches} microbatches",
            fix="plan for a part of the machine: copies of a pipeline run the same plan",
        )


def single_placement(ranks: int) -> Placement:
    """Stage r on rank r: one stage for each rank."""
    return tuple((rank,) for rank in range(ranks))


def looped_placement(ranks: int, stages_per_rank: int) -> Placement:
    """Stages dealt out in turn, so that rank r holds r, r + ranks, r + 2 ranks, ..."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def v_placement(ranks: int) -> Placement:
    """Down the ranks and up again: rank r holds stages r and 2 * ranks - 1 - r."""
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def freeze(
    name: str, n_microbatches: int, placement: Placement, actions: Sequence[Sequence[Action | Overlap]]
) -> Schedule:
    """Build a schedule from lists."""
    return Schedule(name, n_microbatches, placement, tuple(tuple(steps) for steps in actions))
