"""Which saved tensors to move, when to let go of them and when to bring them back: computed from the step before.

A step is a row of events: tensors are packed by the forward and used by the backward. Two questions:

**Which, for a budget?** Whenever more than the budget would be on the device, the tensor whose use is furthest away
goes (Bélády's rule, which is optimal when the uses are known). Since they are known from the step before, a tensor that
must go goes as soon as it is packed, and the link works from the start of the step.

**Which, with no budget but no time to lose either ("auto")?** With the times of the events and the speed of the link,
each candidate budget can be played through:

    device   pack ────────┐ released               asked for ┌──────── use
    out          [ copy ]─┘ in order of packing
    back                                     in time for use [ copy ]   as late as may be

The budget with the lowest peak is taken, among those under which nobody waits longer than a small share of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

PACK, USE = 0, 1
Event = tuple[int, int]  # PACK or USE, and the tensor's number in the order of packing


@dataclass(frozen=True, slots=True)
class Record:
    """One step as it went: the tensors' sizes, what happened in which order, and when, if that was measured."""

    sizes: tuple[int, ...]
    events: tuple[Event, ...]
    times: tuple[float, ...] = ()

    @property
    def order(self) -> list[int]:
        """The tensors in the order of their use."""
        return [number for kind, number in self.events if kind == USE]

    @property
    def total(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do in a step like the one before."""

    moves: frozenset[int]
    order: tuple[int, ...]  # of use
    count: int  # tensors in the step
    total: int  # their bytes
    release: dict[int, int]  # after how many events a moved tensor is off the device; empty: as room is needed
    fetch: dict[int, int]  # after how many events it is asked back; empty: a fixed number of bytes ahead
    predicted_peak: int = 0
    predicted_stall: float = 0.0


def furthest_first(record: Record, budget: int) -> frozenset[int]:
    """The tensors to move so that never more than ``budget`` bytes of the others are on the device.

    Example:
        >>> steps = ((PACK, 0), (PACK, 1), (PACK, 2), (USE, 2), (USE, 1), (USE, 0))
        >>> sorted(furthest_first(Record((5, 5, 5), steps), budget=10))
        [0]
    """
    used_at = {number: place for place, (kind, number) in enumerate(record.events) if kind == USE}
    here: set[int] = set()
    by_use: list[tuple[int, int]] = []
    moved: set[int] = set()
    held = 0
    for kind, number in record.events:
        size = record.sizes[number]
        if kind == PACK:
            here.add(number)
            held += size
            heappush(by_use, (-used_at.get(number, len(record.events)), number))
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


def plan_for_budget(record: Record, budget: int) -> Plan:
    """A plan that keeps ``budget`` bytes on the device, whatever time the others take."""
    return Plan(
        moves=furthest_first(record, budget),
        order=tuple(record.order),
        count=len(record.sizes),
        total=record.total,
        release={},
        fetch={},
    )


def plan_in_time(
    record: Record, rate_out: float, rate_back: float, *, tolerance: float = 0.03, candidates: int = 200
) -> Plan:
    """The plan with the lowest peak of those that make the step longer by at most ``tolerance`` of itself."""
    limit = tolerance * (record.times[-1] - record.times[0])
    best: Plan | None = None
    for share in range(candidates, -1, -1):
        moves = furthest_first(record, record.total * share // candidates)
        plan = _play(record, moves, rate_out, rate_back, patience=limit / 2)
        if plan.predicted_stall <= limit and (best is None or plan.predicted_peak < best.predicted_peak):
            best = plan
    assert best is not None  # moving nothing takes no time
    return best


def _play(record: Record, moves: frozenset[int], rate_out: float, rate_back: float, patience: float) -> Plan:
    """Play a step through: the times at which copies are over and begin, and the bytes on the device between.

    The computation waits up to ``patience`` for copies to be over, once: after that they keep pace with it. What comes
    back is asked for as much earlier.
    """
    packed = {n: t for (kind, n), t in zip(record.events, record.times, strict=True) if kind == PACK}
    used = {n: t for (kind, n), t in zip(record.events, record.times, strict=True) if kind == USE}
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
    return Plan(
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
    """How many events come before ``moment``, and one."""
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if times[middle] < moment:
            low = middle + 1
        else:
            high = middle
    return low + 1
