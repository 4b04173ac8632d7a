"""What one forward showed: the calls of the pieces in order, and which segments use which values.

From this follows, for any cuts, what crosses them. Whatever is made in one stage and used in a later one is sent from
stage to stage until it is used for the last time; so is what the stages' glue needs of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sternway.errors import PipelineError
from sternway.pipeline.forward._follow import Key

Call = tuple[str, int]
"""A call of a piece: its name, and how often it was called before."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that cannot be cut in two: what was done in one segment would be needed, as it is, in others.

    Attributes:
        what: the fault, as an error says it.
        made: the segment where it begins.
        used: the segment where it ends, or None if every later stage would need it.
        line: of the model's code.
        fix: what to do.
        is_seen: whether a stage that comes upon it raises anyway.
    """

    what: str
    made: int
    used: int | None
    line: str
    fix: str
    is_seen: bool = False

    def check(self, stage_of: Sequence[int]) -> None:
        """Raise if these cuts would cut it."""
        if stage_of[self.made] != (stage_of[-1] if self.used is None else stage_of[self.used]):
            raise self.error()

    def error(self) -> PipelineError:
        return PipelineError(self.what, got=self.line, fix=self.fix)


@dataclass(slots=True)
class Flow:
    """What a forward showed.

    Attributes:
        calls: the calls of pieces, in order: call i opens segment i + 1.
        uses: for each value that is used, the segments that use it.
        live: the same, for uses that lead to the result. Only these bring gradients back.
        of_all: values that every later stage needs, such as random numbers that an ``if`` looks at.
        batch_used: for each tensor of the batch, the segments whose work uses it.
        batch_free: for each tensor of the batch that glue of all ranks uses, the first segment that does.
        kept: for each parameter, and each buffer of a piece, by name: the segments that use it.
        obstacles: what must not be cut.
        draws_python: whether code between the pieces draws random numbers of Python or numpy.
        makes_tensors: whether it makes tensors of what Python has, which may be such numbers.
        batch: where each tensor of the batch was.
    """

    calls: list[Call] = field(default_factory=list)
    uses: dict[Key, set[int]] = field(default_factory=dict)
    live: dict[Key, set[int]] = field(default_factory=dict)
    of_all: set[Key] = field(default_factory=set)
    batch_used: dict[int, set[int]] = field(default_factory=dict)
    batch_free: dict[int, int] = field(default_factory=dict)
    kept: dict[str, set[int]] = field(default_factory=dict)
    obstacles: list[Obstacle] = field(default_factory=list)
    draws_python: bool = False
    makes_tensors: bool = False
    batch: tuple[str, ...] = ()

    def add(self, other: Flow) -> None:
        """Add what another forward used, and what it showed that must not be cut, if it called the same pieces."""
        self.makes_tensors |= other.makes_tensors
        if other.calls != self.calls:
            return
        for mine, others in ((self.uses, other.uses), (self.live, other.live)):
            for key, segments in others.items():
                mine.setdefault(key, set()).update(segments)
        for leaf, segments in other.batch_used.items():
            self.batch_used.setdefault(leaf, set()).update(segments)
        for leaf, segment in other.batch_free.items():
            self.batch_free[leaf] = min(segment, self.batch_free.get(leaf, segment))
        for name, segments in other.kept.items():
            self.kept.setdefault(name, set()).update(segments)
        self.of_all |= other.of_all
        self.draws_python |= other.draws_python
        self.obstacles += [each for each in other.obstacles if not each.is_seen]

    def crossing(self, stage_of_call: Mapping[Call, int]) -> Crossing:
        """What crosses the cuts between stages.

        Raises:
            PipelineError: if something would be cut that cannot be, or calls are not in the order of the stages.
        """
        stage_of = self.stages(stage_of_call)
        for obstacle in self.obstacles:
            obstacle.check(stage_of)
        last = max(stage_of_call.values(), default=0)
        if last != stage_of[-1]:
            raise PipelineError(
                "the forward must call a module of every stage",
                got=f"none of stage {stage_of[-1] + 1}",
                fix="pass sample=, one microbatch that takes the usual way",
            )
        sends: list[set[Key]] = [set() for _ in range(last)]
        dead: list[set[Key]] = [set() for _ in range(last)]
        for key, segments in self.uses.items():
            end = last if key in self.of_all else max(stage_of[segment] for segment in segments)
            live_end = max((stage_of[segment] for segment in self.live.get(key, ())), default=-1)
            for stage in range(stage_of[key[0]], end):
                sends[stage].add(key)
                if stage >= live_end:
                    dead[stage].add(key)
        needs: list[set[int]] = [set() for _ in range(last + 1)]
        for leaf, segments in self.batch_used.items():
            for segment in segments:
                needs[stage_of[segment]].add(leaf)
        for leaf, segment in self.batch_free.items():
            for stage in range(stage_of[segment], last + 1):
                needs[stage].add(leaf)
        batch = [frozenset().union(*needs[stage + 1 :]) for stage in range(last)]
        values, no_gradient = tuple(map(frozenset, sends)), tuple(map(frozenset, dead))
        return Crossing(values, no_gradient, tuple(batch), self.draws_python, self.makes_tensors, self.batch)

    def describe(self, key: Key) -> str:
        """Where a value comes from, in words."""
        segment, function, _, _ = key
        piece = self.calls[segment - 1][0] if segment else "the beginning"
        return f"{function} after {piece}" if function else piece

    def stages(self, stage_of_call: Mapping[Call, int]) -> list[int]:
        """The stage of each segment.

        Raises:
            PipelineError: if a stage calls a piece of an earlier one.
        """
        found = [0]
        for name, number in self.calls:
            stage = stage_of_call.get((name, number), stage_of_call.get((name, -1)))
            if stage is None or stage < found[-1]:
                raise PipelineError(
                    "the stages must be in the order in which the forward calls their modules",
                    got=f"{name} of stage {stage} after modules of stage {found[-1]}",
                    fix="pass sample=, one microbatch, from which that order is found",
                )
            found.append(stage)
        return found


@dataclass(frozen=True, slots=True)
class Crossing:
    """What each stage sends to the next: keys of values, and numbers of tensors of the batch.

    No gradient is expected for values that are ``dead``: what they are used for does not lead to the result. With
    ``draws_python``, all stages must draw the same random numbers of Python; without ``makes_tensors``, no code between
    the pieces made a tensor of what Python has. ``places`` are those of the batch's tensors.
    """

    values: tuple[frozenset[Key], ...]
    dead: tuple[frozenset[Key], ...]
    batch: tuple[frozenset[int], ...]
    draws_python: bool
    makes_tensors: bool
    places: tuple[str, ...]

    def of_batch(self, places: tuple[str, ...]) -> Crossing:
        """For a batch with tensors in these places; those that the sample had not go to all stages."""
        if places == self.places:
            return self
        numbers = {place: number for number, place in enumerate(self.places)}
        batch = [
            frozenset(i for i, place in enumerate(places) if numbers.get(place, -1) in {-1, *own}) for own in self.batch
        ]
        return replace(self, batch=tuple(batch), places=places)
