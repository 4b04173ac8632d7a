"""Learns from each round what to do in the next."""

from __future__ import annotations

from typing import Any

import torch

from sternway.saved._mover import Mover
from sternway.saved._plan import Plan, Record, plan_for_budget, plan_in_time
from sternway.saved._round import Round
from sternway.saved._store import Store

_LINK_SHARE = 0.97  # of the link's speed as measured alone, that "auto" counts on
_MEASURED = 2  # steps that "auto" times before it plans: the first one warms up
_ALIKE = 0.25  # a step's bytes may differ by this share from the planned step's


class Planner:
    """One engine's budget, and its plan."""

    def __init__(self, budget: int | float | str) -> None:
        self.plan: Plan | None = None
        self._auto = budget == "auto"
        self._budget: Any = budget
        self._last: Record | None = None
        self._measured: list[tuple[Round, Mover]] = []
        self._rates: tuple[float, float] | None = None

    @property
    def limit(self) -> float:
        """Bytes that may stay on the device."""
        if self._auto:
            return float("inf")
        if isinstance(self._budget, float):  # of what a step saves: none, until one is known
            return self._budget * (self._last.total if self._last is not None else 0)
        return int(self._budget)

    @property
    def timing(self) -> bool:
        """Whether this round's events are to be timed."""
        return self._auto and self.plan is None

    def goes(self, number: int) -> bool:
        """Whether a slot goes as soon as it is packed."""
        if self.plan is not None and number < self.plan.count:
            return number in self.plan.moves
        return not self._auto and self.limit == 0

    def begin(self, store: Store, device: torch.device) -> None:
        """A round begins. The times of those before are known by now, or soon."""
        if len(self._measured) < _MEASURED:
            return
        if self._rates is None:
            self._rates = store.rates(device)
        records = [
            Record(tuple(timed.sizes), tuple(timed.events), tuple(mover.times(timed.marks)))
            for timed, mover in self._measured
        ]
        self._measured = []
        fastest = min(records, key=lambda record: record.times[-1])
        self.plan = plan_in_time(fastest, *(_LINK_SHARE * rate for rate in self._rates))

    def end(self, round_: Round, mover: Mover) -> None:
        """A round is over."""
        record = Record(tuple(round_.sizes), tuple(round_.events))
        if not self._auto and record == self._last:
            return  # the plan is made
        self._last = record
        if not self._auto:
            self.plan = plan_for_budget(record, int(self.limit))
        elif self.plan is None:
            self._measured.append((round_, mover))
        elif self.plan.count != len(record.sizes) or abs(record.total / self.plan.total - 1) > _ALIKE:
            self.plan = None  # another kind of step: measure anew
