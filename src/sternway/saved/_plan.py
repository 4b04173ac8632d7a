"""Which saved tensors to move, when to drop them from the device and when to bring them back.

A plan is computed from the step before. A step is a sequence of accesses: the forward packs tensors, the backward uses
them.

**With a budget.** Whenever more than the budget would be on the device, the tensor that is used last is moved
(Bélády's rule, which is optimal when the uses are known). Because they are known from the step before, a tensor that
will have to go is sent as soon as it is packed, so that the link is busy from the start of the step.

**With "auto".** The step should not get longer. From the times of the accesses and the speed of the link, each
candidate budget is simulated:

    device   pack ────────┐ released               asked for ┌──────── use
    out          [ copy ]─┘ in order of packing
    back                                     in time for use [ copy ]   as late as possible

Of the budgets under which the computation waits no longer than a small share of the step, the one with the lowest peak
is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import torch

from sternway.saved.stores._copies import Mover
from sternway.saved.stores._store import Store

_LINK_SHARE = 0.97  # of the link's speed as measured alone, that "auto" counts on
_MEASURED = 2  # steps that "auto" times before it plans: the first one warms up
_ALIKE = 0.25  # a step's bytes may differ by this share from the planned step's

PACK, USE = 0, 1
Access = tuple[int, int]
"""PACK or USE, and the tensor's number in the order of packing."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step that is over: the tensors' sizes, the accesses in order, and their times, if those were measured."""

    sizes: tuple[int, ...]
    accesses: tuple[Access, ...]
    times: tuple[float, ...] = ()

    @property
    def order(self) -> list[int]:
        """The tensors in the order of their use."""
        return [number for kind, number in self.accesses if kind == USE]

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What to do in a step like the one before."""

    moves: frozenset[int]
    order: tuple[int, ...]  # of use
    count: int  # tensors in the step
    total: int  # their bytes
    release: dict[int, int]  # after how many accesses a moved tensor is dropped; empty: as room is needed
    fetch: dict[int, int]  # after how many accesses it is asked back; empty: a fixed number of bytes ahead
    predicted_peak: int = 0
    predicted_stall: float = 0.0


def furthest_first(record: Record, budget: int) -> frozenset[int]:
    """The tensors to move so that the others never take more than ``budget`` bytes on the device.

    Example:
        >>> steps = ((PACK, 0), (PACK, 1), (PACK, 2), (USE, 2), (USE, 1), (USE, 0))
        >>> sorted(furthest_first(Record((5, 5, 5), steps), budget=10))
        [0]
    """
    used_at = {number: place for place, (kind, number) in enumerate(record.accesses) if kind == USE}
    here: set[int] = set()
    by_use: list[tuple[int, int]] = []
    moved: set[int] = set()
    held = 0
    for kind, number in record.accesses:
        size = record.sizes[number]
        if kind == PACK:
            here.add(number)
            held += size
            heappush(by_use, (-used_at.get(number, len(record.accesses)), number))
            while held > budget:
                _, victim = heappop(by_use)
                if victim in here:
                    here.discard(victim)
                    moved.add(victim)
                    held -= record.sizes[victim]
        elif number in here:
            here.discard(number)
            held -= size
    return frozenset(moved)


def plan_for_budget(record: Record, budget: int) -> OffloadPlan:
    """A plan that keeps ``budget`` bytes on the device, however long the copies take."""
    return OffloadPlan(
        moves=furthest_first(record, budget),
        order=tuple(record.order),
        count=len(record.sizes),
        total=record.total,
        release={},
        fetch={},
    )


def plan_in_time(
    record: Record, rate_out: float, rate_back: float, *, tolerance: float = 0.03, candidates: int = 200
) -> OffloadPlan:
    """The plan with the lowest peak of those that make the step longer by at most ``tolerance`` of itself."""
    limit = tolerance * (record.times[-1] - record.times[0])
    best: OffloadPlan | None = None
    for share in range(candidates, -1, -1):
        moves = furthest_first(record, record.total * share // candidates)
        plan = _simulate(record, moves, rate_out, rate_back, patience=limit / 2)
        if plan.predicted_stall <= limit and (best is None or plan.predicted_peak < best.predicted_peak):
            best = plan
    assert best is not None  # moving nothing takes no time
    return best


def _simulate(record: Record, moves: frozenset[int], rate_out: float, rate_back: float, patience: float) -> OffloadPlan:
    """Simulate a step: when copies end and begin, and how many bytes are on the device in between.

    The computation waits up to ``patience`` for the copies out, once; after that they keep pace with it. Copies back
    are asked for as much earlier.
    """
    packed = {n: t for (kind, n), t in zip(record.accesses, record.times, strict=True) if kind == PACK}
    used = {n: t for (kind, n), t in zip(record.accesses, record.times, strict=True) if kind == USE}
    end = record.times[-1]
    gone: dict[int, float] = {}
    clock = record.times[0]
    for number in sorted(moves):
        clock = max(clock, packed[number]) + record.sizes[number] / rate_out
        gone[number] = clock
    asked: dict[int, float] = {}
    clock = end
    for number in reversed([n for n in record.order if n in moves]):
        clock = min(clock, used[number]) - record.sizes[number] / rate_back
        asked[number] = clock
    leave = {n: max(packed[n], t - patience) for n, t in gone.items()}
    waited = max([t - leave[n] for n, t in gone.items()], default=0.0)
    stall = max([leave[n] - start for n, start in asked.items()], default=0.0)
    changes: list[tuple[float, int]] = []
    for number, size in enumerate(record.sizes):
        changes += [(packed[number], size), (used.get(number, end), -size)]
        if number in moves:
            changes += [(leave[number], -size), (max(asked.get(number, end), leave[number]), size)]
    held = peak = 0
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return OffloadPlan(
        moves=moves,
        order=tuple(record.order),
        count=len(record.sizes),
        total=record.total,
        release={n: _first_after(record.times, t) for n, t in leave.items()},
        fetch={n: max(_first_after(record.times, t - patience) - 1, 0) for n, t in asked.items()},
        predicted_peak=peak,
        predicted_stall=waited + max(stall, 0.0),
    )


def _first_after(times: Sequence[float], moment: float) -> int:
    """One more than the number of accesses before ``moment``."""
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if times[middle] < moment:
            low = middle + 1
        else:
            high = middle
    return low + 1


class Planner:
    """An offloader's budget, and the plan that it learns from each round for the next."""

    def __init__(self, budget: int | float | str) -> None:
        self.plan: OffloadPlan | None = None
        self._auto = budget == "auto"
        self._budget: Any = budget
        self._last: Record | None = None
        self._measured: list[tuple[Record, list[Any], Mover]] = []
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
        """Whether this round's accesses are to be timed."""
        return self._auto and self.plan is None

    def goes(self, number: int) -> bool:
        """Whether a tensor is sent as soon as it is packed."""
        if self.plan is not None and number < self.plan.count:
            return number in self.plan.moves
        return not self._auto and self.limit == 0

    def begin(self, store: Store, device: torch.device) -> None:
        """A round begins; the times of the rounds before it are known by now, or soon."""
        if len(self._measured) < _MEASURED:
            return
        if self._rates is None:
            self._rates = store.rates(device)
        records = [replace(record, times=tuple(mover.times(marks))) for record, marks, mover in self._measured]
        self._measured = []
        fastest = min(records, key=lambda record: record.times[-1])
        self.plan = plan_in_time(fastest, *(_LINK_SHARE * rate for rate in self._rates))

    def end(self, record: Record, marks: list[Any], mover: Mover) -> None:
        """A round is over."""
        if not self._auto and record == self._last:
            return  # the plan is made
        self._last = record
        if not self._auto:
            self.plan = plan_for_budget(record, int(self.limit))
        elif self.plan is None:
            self._measured.append((record, marks, mover))
        elif self.plan.count != len(record.sizes) or abs(record.total / self.plan.total - 1) > _ALIKE:
            self.plan = None  # another kind of step: measure again
