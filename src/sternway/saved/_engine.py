"""Moves slots to a store and back: what goes, what stays, who waits for what.

A *round* is from the first slot packed while none is alive to the moment when none is alive any more: a step, with as
many microbatches as it has. A round is recorded, and the record makes the plan for the next (``_plan``).

    packed ─▶ here ─send─▶ in flight ─release─▶ away ─ask─▶ coming ─join─▶ used
                │              │ used before it was released: no copy back
                └── used       └──▶

All decisions are made under one lock, by whoever packs or unpacks: there is no thread of our own. Slots die whenever
Python says so, also while the lock is held; they leave a note, and whoever holds the lock next tidies up.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sternway.saved._plan import PACK, USE, Event, Plan
from sternway.saved._planner import Planner
from sternway.saved._report import Line
from sternway.saved._round import Gone, Round
from sternway.saved._slot import Slot
from sternway.saved._store import Arrival, Away, Store


class Engine:
    """One offload policy's slots."""

    def __init__(self, store: Store, budget: int | float | str, prefetch: int, window: int) -> None:
        self.store = store
        self.rounds = 0
        self._planner = Planner(budget)
        self._prefetch, self._window = prefetch, window
        self._round = Round()
        self._mover: Any = None
        self._alive = 0
        self._lock = threading.Lock()
        self._notes: deque[Gone] = deque()
        self._open = 0
        self._forget = False

    @property
    def plan(self) -> Plan | None:
        """What is done in a step like the last one, once a step has been seen."""
        return self._planner.plan

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            self._tidy()
            yield
        self._sweep()

    # Packing

    def admit(self, slot: Slot) -> None:
        """Take a new slot in hand; it may go at once, or stay, or make an older one go."""
        with self._working():
            self.store.raise_failure()
            if not self._alive:
                self._begin(slot)
            round_ = self._round
            slot.number = number = len(round_.sizes)
            round_.sizes.append(slot.nbytes)
            round_.slots[number] = round_.here[number] = weakref.ref(slot)
            round_.here_bytes += slot.nbytes
            slot.line.stay(slot.nbytes)
            slot.line.hold(slot.nbytes)
            self._alive += 1
            slot.engine = self
            self._note((PACK, number))
            try:
                if self._planner.goes(number):
                    self._send(slot)
                budget = self._planner.limit
                while round_.here_bytes > budget and (oldest := self._oldest()) is not None:
                    self._send(oldest)
            finally:
                self._release()

    def _begin(self, slot: Slot) -> None:
        assert slot.payload is not None  # new
        if self._mover is None:
            self._mover = self.store.mover(slot.payload.device)
        self._planner.begin(self.store, slot.payload.device)
        self._round = Round()

    def _oldest(self) -> Slot | None:
        for reference in self._round.here.values():
            if (slot := reference()) is not None:
                return slot
        return None

    def _send(self, slot: Slot) -> None:
        """Start to move a slot; it stays if the store has no room."""
        assert slot.payload is not None
        round_, number = self._round, slot.number
        slot.away = self.store.send(slot.payload, slot.dtype.itemsize if slot.codec is None else 1, slot.lossless)
        del round_.here[number]
        round_.here_bytes -= slot.nbytes
        slot.line.stay(-slot.nbytes)
        if slot.away is None:
            slot.line.no_room(slot.nbytes)
        else:
            slot.line.move(slot.nbytes)
            round_.flights[number] = weakref.ref(slot)
            round_.flight_bytes += slot.nbytes

    def _release(self) -> None:
        """Let go of what is away by now, and of what must be: the computation then waits for the copy."""
        round_ = self._round
        timed = self.plan.release if self.plan is not None else {}
        tick = len(round_.events)
        for number, reference in list(round_.flights.items()):
            slot = reference()
            if slot is None or slot.away is None:
                continue
            if number in timed:
                due = timed[number] <= tick and number not in round_.used
            else:
                due = round_.flight_bytes > self._window
            # In the backward what is still here is what is needed first: it goes only if it must.
            if slot.away.out.done() and (due or not round_.used):
                self._leave(slot)
            elif due:
                slot.line.wait(slot.away.out.join())
                self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        del self._round.flights[slot.number]
        self._round.flight_bytes -= slot.nbytes
        slot.release()
        slot.line.hold(-slot.nbytes)
        if slot.number not in self._round.used:  # it may have been passed over while it was here
            self._round.next = min(self._round.next, self._round.place.get(slot.number, self._round.next))

    def settle(self, slot: Slot) -> bool:
        """Finish a copy that is under way, because its source will change; whether the slot is away."""
        with self._working():
            if slot.away is None or slot.payload is None:
                return slot.payload is None
            slot.away.out.join()
            self._leave(slot)
            return True

    # Unpacking

    def fetch(self, slot: Slot) -> Tensor:
        """The slot's bytes, on the device, for what is computed from now on."""
        with self._working():
            round_, number = self._round, slot.number
            if number not in round_.used:
                round_.used.add(number)
                self._note((USE, number))
            if number not in round_.place:
                self._expect()
            slot.uses -= 1
            last = slot.uses <= 0
            if last:
                slot.uses = slot.packs  # for a second backward, of a graph that is retained
            payload = slot.payload
            if payload is None:
                arrival = round_.coming.get(number) or self._ask(slot)
                payload, wait = arrival.join()
                slot.line.wait(wait)
                if last:
                    self._arrived(number, slot)
            elif number in round_.flights and last and slot.away is not None:
                # It is used where it is. The copy goes on; whatever frees the memory must come after it.
                slot.away.out.let_go(payload)
                self._leave(slot)
            self._ahead(number)
            self._release()
            return payload

    def _expect(self) -> None:
        """Set out the order in which slots will be asked for: the last round's, or the reverse of packing."""
        round_ = self._round
        plan = self.plan
        known = dict.fromkeys(plan.order) if plan is not None and len(round_.sizes) <= plan.count else {}
        round_.order = [*known, *(number for number in reversed(round_.slots) if number not in known)]
        round_.place = {number: place for place, number in enumerate(round_.order)}
        round_.next = 0

    def _ask(self, slot: Slot) -> Arrival:
        assert slot.away is not None  # not on the device
        round_ = self._round
        arrival = round_.coming[slot.number] = slot.away.back()
        round_.coming_bytes += slot.nbytes
        slot.line.hold(slot.nbytes)
        return arrival

    def _arrived(self, number: int, slot: Slot) -> None:
        if self._round.coming.pop(number, None) is not None:
            self._round.coming_bytes -= slot.nbytes
            slot.line.hold(-slot.nbytes)

    def _ahead(self, number: int) -> None:
        """Ask for what will be used next, as early as planned, or as many bytes ahead as may be."""
        round_ = self._round
        timed = self.plan.fetch if self.plan is not None else {}
        tick = len(round_.events)
        round_.next = max(round_.next, round_.place[number] + 1)
        while round_.next < len(round_.order):
            upcoming = round_.order[round_.next]
            reference = round_.slots.get(upcoming)
            slot = reference() if reference is not None else None
            if (
                slot is not None
                and slot.payload is None
                and upcoming not in round_.coming
                and upcoming not in round_.used
            ):
                if upcoming in timed:
                    if timed[upcoming] > tick:
                        return
                elif not self._prefetch or (round_.coming_bytes and round_.coming_bytes + slot.nbytes > self._prefetch):
                    return
                self._ask(slot)
            elif upcoming >= len(round_.sizes):
                return  # not packed yet: a microbatch to come
            round_.next += 1

    def _note(self, event: Event) -> None:
        round_ = self._round
        round_.events.append(event)
        if self._planner.timing:
            round_.marks.append(self._mover.mark())

    # The end of slots, rounds and blocks

    def dropped(self, number: int, size: int, away: Away | None, payload: Tensor | None, line: Line) -> None:
        """A slot is gone. Called by its finalizer, at any moment: nothing but a note if somebody is at work."""
        self._notes.append(Gone(number, size, away, payload, line))
        self._sweep()

    def _sweep(self) -> None:
        while self._notes and self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        while self._notes:
            gone = self._notes.popleft()
            round_ = self._round
            self._alive -= 1
            round_.slots.pop(gone.number, None)
            if round_.here.pop(gone.number, None) is not None:
                round_.here_bytes -= gone.size
            if round_.flights.pop(gone.number, None) is not None:
                round_.flight_bytes -= gone.size
                if gone.payload is not None and gone.away is not None:
                    gone.away.out.let_go(gone.payload)
            if (arrival := round_.coming.pop(gone.number, None)) is not None:
                round_.coming_bytes -= gone.size
                arrival.drop()
                gone.line.hold(-gone.size)
            if gone.payload is not None:
                gone.line.hold(-gone.size)
            if gone.away is not None:
                gone.away.free()
            if not self._alive:
                self._end()

    def _end(self) -> None:
        """A round is over: make the next one's plan."""
        round_ = self._round
        self.rounds += 1
        if round_.used:
            self._planner.end(round_, self._mover)
        if not self._open:
            self.store.idle(self._forget)

    def opened(self) -> None:
        """A ``with`` block begins."""
        with self._working():
            if not self._open:
                self.store.opened()
            self._open += 1
            self._forget = False

    def closed(self, failed: bool) -> None:
        """A ``with`` block ends; after an error, buffers are not kept for reuse."""
        with self._working():
            self._open -= 1
            self._forget = self._forget or failed
            if not self._open and not self._alive:
                self.store.idle(self._forget)
            if not failed:
                self.store.raise_failure()
