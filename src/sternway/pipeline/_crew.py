"""The processes that save and resume together: what one of them finds, all know; if one fails, all fail.

One process alone is a crew of one. Objects that travel here are the project's own, between processes of one run, over
a gloo group of their own, so that a save may go on beside a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from sternway.errors import CheckpointError, LostRankError

T = TypeVar("T")


class Outcome(Generic[T]):
    """What a call gave, or the error it ended in, as it travels to the others."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._value: T | None = None
        self.error: CheckpointError | None = None
        try:
            self._value = call()
        except CheckpointError as error:
            self.error = error
        except Exception as error:
            self.error = CheckpointError(
                "every process does its part of a checkpoint",
                got=f"{type(error).__name__}: {error}",
                fix="mend the cause; what was saved before is unharmed",
            )

    @classmethod
    def of(cls, value: T) -> Outcome[T]:
        return cls(lambda: value)

    def result(self, where: str = "") -> T:
        """What the call gave.

        Raises:
            CheckpointError: what it ended in.
        """
        if self.error is not None:
            raise CheckpointError(self.error.rule, got=self.error.got + where, fix=self.error.fix)
        return self._value  # type: ignore[return-value]  # no error, so a value


class Crew:
    """Args:
    group: a gloo process group, or None for one process alone.
    explain: turns a lost connection into an error that says which rank was lost.
    """

    def __init__(self, group: Any = None, explain: Callable[[Exception], LostRankError] | None = None) -> None:
        self._group, self._explain = group, explain
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, value: T) -> list[T]:
        """Every process's value, on every process."""
        if self._group is None:
            return [value]
        rows: list[Any] = [None] * self.size
        self._try(lambda: dist.all_gather_object(rows, value, group=self._group))
        return rows

    def gather(self, value: T) -> list[T]:
        """Every process's value, on the first; an empty list elsewhere."""
        if self._group is None:
            return [value]
        rows: list[Any] | None = [None] * self.size if self.leads else None
        self._try(lambda: dist.gather_object(value, rows, group_dst=0, group=self._group))
        return rows or []

    def scatter(self, values: list[T]) -> T:
        """The first process's list, one entry for each."""
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        self._try(
            lambda: dist.scatter_object_list(mine, values if self.leads else None, group_src=0, group=self._group)
        )
        return mine[0]  # type: ignore[no-any-return]  # whatever the first put there

    def from_first(self, call: Callable[[], T]) -> T:
        """What ``call`` gives on the first process, on every process; if it raises there, all raise."""
        found = self.share(Outcome(call) if self.leads else None)[0]
        assert found is not None
        return found.result()

    def agree(self, call: Callable[[], T]) -> list[T]:
        """What ``call`` gives on each process; if it raises on one, all raise."""
        return self.whole(self.share(Outcome(call)))

    def whole(self, outcomes: list[Outcome[T]]) -> list[T]:
        """What all outcomes gave, if none is an error."""
        return [
            outcome.result(f" (on process {rank})" if self.size > 1 else "") for rank, outcome in enumerate(outcomes)
        ]

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise (self._explain(error) if self._explain is not None else error) from None
