"""Moves saved bytes to a store and back: which of them go, which stay, what waits for what.

A *round* (``_round``) is one step. A round is recorded, and the record makes the plan for the next one (``_plan``).

All decisions are made under one lock, in the threads that pack and unpack: there is no thread of our own. Slots are
finalized whenever Python does so, also while the lock is held; then their bytes are queued, and freed by whoever holds
the lock next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from sternway.errors import SavedError
from sternway.saved._content import SavedBytes
from sternway.saved._plan import OffloadPlan, Planner
from sternway.saved._round import Round
from sternway.saved.stores._copies import Mover
from sternway.saved.stores._store import Store


class Offloader:
    """Everything that one offload policy moves.

    Args:
        store: where bytes go.
        budget: how much may stay on the device: bytes, a fraction of what a step saves, or "auto".
        prefetch: how many bytes may be on their way back before they are used.
        window: how many bytes may be on their way out before the computation waits.
    """

    def __init__(self, store: Store, budget: int | float | str, prefetch: int, window: int) -> None:
        self.store = store
        self.rounds = 0
        self._planner = Planner(budget)
        self._prefetch, self._window = prefetch, window
        self._round = Round()
        self._mover: Mover | None = None
        self._lock = threading.Lock()
        self._dropped: deque[SavedBytes] = deque()
        self._open = 0
        self._forget = False

    @property
    def plan(self) -> OffloadPlan | None:
        """What is done in a step like the last one, once a step has been seen."""
        return self._planner.plan

    @contextmanager
    def _working(self) -> Iterator[None]:
        with self._lock:
            self._tidy()
            yield
        self._sweep()

    # Packing

    def admit(self, content: SavedBytes) -> None:
        """Take charge of a new slot's bytes: they may go at once, or stay, or make older ones go."""
        with self._working():
            self.store.raise_failure()
            if not self._round.alive:
                self._begin(content)
            round_, planner = self._round, self._planner
            round_.admit(content)
            self._mark()
            try:
                if planner.goes(content.number):
                    round_.send(content, self.store)
                limit = planner.limit
                while round_.here.nbytes > limit and (oldest := round_.here.first()) is not None:
                    round_.send(oldest, self.store)
            finally:
                self._release()

    def _begin(self, content: SavedBytes) -> None:
        assert content.data is not None  # new
        if self._mover is None:
            self._mover = self.store.mover(content.data.device)
        self._planner.begin(self.store, content.data.device)
        self._round = Round()

    def _mark(self) -> None:
        """Time the latest access, if accesses are to be timed."""
        if self._planner.timing:
            assert self._mover is not None
            self._round.mark(self._mover.mark())

    def _release(self) -> None:
        """Drop from the device what has been copied, and what is due: the computation then waits for the copy."""
        round_ = self._round
        timed = self.plan.release if self.plan is not None else {}
        tick = len(round_.accesses)
        for content in round_.flights:
            number, away = content.number, content.away
            assert away is not None  # it was sent
            if number in timed:
                due = timed[number] <= tick and number not in round_.used
            else:
                due = round_.flights.nbytes > self._window
            # In the backward what is still here is needed first: it goes only if it must.
            if away.out.done() and (due or not round_.used):
                round_.release(content)
            elif due:
                content.wait_out()
                round_.release(content)

    def put_away(self) -> None:
        """Drop from the device all that was sent; the computation waits for the copies."""
        with self._working():
            for content in self._round.flights:
                content.wait_out()
                self._round.release(content)

    def bring_back(self) -> None:
        """Start to bring back all that is away."""
        with self._working():
            for content in self._round.alive.values():
                if content.data is None and content.arrival is None:
                    self._round.ask(content)

    def settle(self, content: SavedBytes) -> bool:
        """Finish the copy out, because its source is about to change; whether the bytes are off the device now."""
        with self._working():
            if content.data is None:
                return True
            if content.away is None:
                return False
            content.away.out.join()
            self._round.release(content)
            return True

    # Unpacking

    def fetch(self, content: SavedBytes) -> Tensor:
        """The bytes on the device, for whatever is computed from now on."""
        with self._working():
            round_, plan = self._round, self.plan
            known = plan.order if plan is not None and len(round_.sizes) <= plan.count else ()
            if round_.use(content, known):
                self._mark()
            data = round_.fetch(content)
            self._prefetch_next()
            self._release()
            return data

    def _prefetch_next(self) -> None:
        """Ask for what will be used next, as early as planned, or as many bytes ahead as allowed."""
        round_ = self._round
        timed = self.plan.fetch if self.plan is not None else {}
        tick, coming = len(round_.accesses), round_.coming
        while (content := round_.next_away()) is not None:
            if content.number in timed:
                if timed[content.number] > tick:
                    return
            elif not self._prefetch or (coming.nbytes and coming.nbytes + content.nbytes > self._prefetch):
                return
            round_.ask(content)

    # The end of slots, rounds and blocks

    def dropped(self, content: SavedBytes) -> None:
        """A slot is gone. Called by its finalizer at any moment, also by a thread that holds the lock."""
        self._dropped.append(content)
        self._sweep()

    def _sweep(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        while self._dropped:
            if self._round.drop(self._dropped.popleft()) and not self._round.alive:
                self._end()

    def _end(self) -> None:
        """A round is over: make the next one's plan."""
        self.rounds += 1
        if self._round.used:
            assert self._mover is not None
            self._planner.end(self._round.record(), self._round.marks, self._mover)
        if not self._open:
            self.store.idle(self._forget)

    def opened(self) -> None:
        """A ``with`` block begins."""
        if self.store.closed:
            raise SavedError("a policy that was closed cannot be entered", got="close() before", fix="make another")
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
            if not self._open and not self._round.alive:
                self.store.idle(self._forget)
            if not failed:
                self.store.raise_failure()
