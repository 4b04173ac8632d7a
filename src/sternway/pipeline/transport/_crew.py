"""The processes of a pipeline, for what they decide together: what one finds, all know; where one fails, all fail.

One process alone is a crew of one. The objects that are exchanged are Sternway's own, between processes of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from sternway.errors import PipelineError, SternwayError
from sternway.pipeline.transport._groups import in_order

T = TypeVar("T")


class Outcome(Generic[T]):
    """The value that a call returned, or the error it raised, in a form that can be sent to other processes.

    Sternway's own errors keep their class. Any other exception becomes a ``wrapped_as``, with its type and text.
    """

    def __init__(self, call: Callable[[], T], wrapped_as: type[SternwayError] = PipelineError) -> None:
        self._value: T | None = None
        self.error: SternwayError | None = None
        try:
            self._value = call()
        except SternwayError as error:
            self.error = error
        except Exception as error:
            self.error = wrapped_as(
                "a process could not do its part",
                got=f"{type(error).__name__}: {error}",
                fix="remove the cause on that process",
            )

    @classmethod
    def of(cls, value: T) -> Outcome[T]:
        return cls(lambda: value)

    def result(self, where: str = "") -> T:
        """The value; or raise the error, with ``where`` added to what it got."""
        if self.error is not None:
            raise type(self.error)(self.error.rule, got=self.error.got + where, fix=self.error.fix)
        return self._value  # type: ignore[return-value]  # no error, so there is a value


class Crew:
    """Processes that exchange objects.

    Args:
        group: a process group, or None for one process alone.
        explain: turns a lost connection into an error that says which rank was lost.
        wraps_as: what an exception that is not Sternway's own becomes; see ``Outcome``.
        members: the global ranks of the group, in the order in which they count; ascending by default.
    """

    def __init__(
        self,
        group: Any = None,
        explain: Callable[[Exception], PipelineError] | None = None,
        wraps_as: type[SternwayError] = PipelineError,
        members: Sequence[int] | None = None,
    ) -> None:
        self._group, self._explain, self._wraps_as = group, explain, wraps_as
        self._members = [0] if group is None else list(members or dist.get_process_group_ranks(group))
        self.rank = 0 if group is None else self._members.index(dist.get_rank())
        self.size = len(self._members)

    def wrapping(self, wraps_as: type[SternwayError]) -> Crew:
        """The same processes, with another class for exceptions that are not Sternway's own."""
        return Crew(self._group, self._explain, wraps_as, self._members)

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def attempt(self, call: Callable[[], T]) -> Outcome[T]:
        """Call it, and keep what comes of it."""
        return Outcome(call, self._wraps_as)

    def share(self, value: T) -> list[T]:
        """Every process's value, on every process."""
        if self._group is None:
            return [value]
        rows: list[Any] = [None] * self.size
        self._run(lambda: dist.all_gather_object(rows, value, group=self._group))
        return in_order(rows, self._members)

    def gather(self, value: T) -> list[T]:
        """Every process's value, on the first; an empty list elsewhere."""
        if self._group is None:
            return [value]
        rows: list[Any] | None = [None] * self.size if self.leads else None
        self._run(lambda: dist.gather_object(value, rows, dst=self._members[0], group=self._group))
        return in_order(rows, self._members) if rows else []

    def scatter(self, values: list[T]) -> T:
        """One entry of the first process's list for each process."""
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        parts = [values[self._members.index(member)] for member in sorted(self._members)] if self.leads else None
        self._run(lambda: dist.scatter_object_list(mine, parts, src=self._members[0], group=self._group))
        return mine[0]  # type: ignore[no-any-return]  # whatever the first put there

    def from_first(self, call: Callable[[], T]) -> T:
        """What ``call`` returns on the first process, on every process; if it raises there, all raise."""
        found = self.share(self.attempt(call) if self.leads else None)[0]
        assert found is not None
        return found.result()

    def agree(self, call: Callable[[], T]) -> list[T]:
        """What ``call`` returns on each process; if it raises on one, all raise."""
        return self.results(self.share(self.attempt(call)))

    def results(self, outcomes: list[Outcome[T]]) -> list[T]:
        """The values of all outcomes; raise the first error, if there is one."""
        return [
            outcome.result(f" (on process {rank})" if self.size > 1 else "") for rank, outcome in enumerate(outcomes)
        ]

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise (self._explain(error) if self._explain is not None else error) from None
