"""Find a rank that died, was stopped or hangs, tell every other rank, and wake those that wait for it.

A process that dies closes its connections: whoever waits for it wakes with an error, but does not know which rank it
was. A process that is stopped keeps them open, and nobody wakes; nor does a GPU that waits. So each rank has a thread
that writes a sign of life into the store and reads those of others (``_signs.py``), and looks whether connections were
closed. Whoever finds a rank lost, or fails itself, writes that into the store; all others read it there, cut their own
connections and abort their communicators, which wakes their main threads and their GPUs.

A main thread may also wait in a group that is not the pipeline's: its stage is sharded, and a peer has failed. If it is
still in its action some time after it was woken, all its connections to other ranks are cut. It finds them by the
addresses of their other ends, which each rank writes into the store.

One process holds the store, and that process may be the one that is lost. A second thread therefore looks at nothing
but the clock, and notices when the first one gets no answer from the store. If the process that holds the store learns
of a loss, it stays until the others know of it, too.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from sternway._torch import distributed
from sternway.pipeline.faults._lost import LostRank, Position
from sternway.pipeline.faults._signs import DROPPED, ENDED, SignsOfLife

_STUCK_SECONDS = 2.0  # after which a main thread that was woken, and is still in an action, waits in another group


class Watch:
    """Two threads that watch over the ranks until ``stop``.

    Args:
        store: torch's store. The watch makes its own connection to it.
        prefix: for keys in the store; the same on every rank, and used by no other pipeline.
        rank: this rank.
        ranks: how many there are.
        heartbeat_timeout: a rank that gives no sign of life for so many seconds is lost.
        step_timeout: so is one whose GPU is in one step for so many seconds.
        holder: the process that holds the store, in words.
        holds_store: whether that is this process.
        wake: called once when a rank is lost, to wake the main thread.
        closed: whether a connection to another rank was closed.
        ends: this side of all connections of this process.
        free: cuts those that lead to any of some addresses, to wake a main thread that ``wake`` does not.

    Attributes:
        lost: the rank that was lost, or None.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        ranks: int,
        heartbeat_timeout: float,
        step_timeout: float,
        holder: str,
        holds_store: bool,
        wake: Callable[[], None],
        closed: Callable[[], bool] = lambda: False,
        ends: Callable[[], list[str]] = list,
        free: Callable[[set[str]], None] = lambda addresses: None,
    ) -> None:
        self.lost: LostRank | None = None
        connection = distributed.own_connection(store, max(1.0, heartbeat_timeout))
        self._signs = SignsOfLife(PrefixStore(prefix, connection), rank, ranks, heartbeat_timeout)
        self._position: Callable[[], Position] = Position
        self._rank, self._ranks, self._timeout, self._interval = rank, ranks, heartbeat_timeout, self._signs.interval
        self._holder, self._holds_store, self._wake, self._closed = holder, holds_store, wake, closed
        self._step_timeout, self._end, self._is_abandoned = step_timeout, "", False
        self._ends, self._free, self._woken = ends, free, math.inf
        self._others: set[str] = set()
        self._waits: Callable[[], float] = lambda: 0.0
        self._told: LostRank | None = None  # this rank's own failure
        self._answered = time.monotonic()
        self._decided, self._stop, self._hurry = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"sternway-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("guard", self._guard))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._exit)  # a thread inside the store's code when Python ends would crash the process

    # For the rank's own thread

    def follow(
        self,
        *,
        position: Callable[[], Position] | None = None,
        awaited: Callable[[int], Position | None] | None = None,
        waits: Callable[[], float] | None = None,
    ) -> None:
        """Ask these functions, from a thread.

        Args:
            position: where this rank is.
            awaited: what it waits for from another rank.
            waits: for how many seconds its GPU has been in one step.
        """
        self._position = position or self._position
        self._signs.awaited = awaited or self._signs.awaited
        self._waits = waits or self._waits

    def position(self) -> Position:
        """Where this rank is."""
        return self._position()

    def note_call(self, name: str) -> None:
        """This rank makes a call for which it needs the others."""
        self._signs.calls.note(name)

    def tell(self, what: str) -> None:
        """This rank fails: let the others know, unless one failed before."""
        self._told = LostRank(self._rank, what, self._position())
        self._hurry.set()
        self._decided.wait(self._timeout)

    def cause(self) -> LostRank:
        """A connection was lost: which rank was it? Takes ``heartbeat_timeout`` seconds, or little more."""
        self._signs.suspicious = True
        self._hurry.set()
        self._decided.wait(self._timeout + 4 * self._interval)
        return self.lost or LostRank(None, "a connection was lost")

    def lost_peer(self) -> LostRank | None:
        """An action failed in a group with other ranks: the rank that was lost before, if any.

        If none is found, this takes ``heartbeat_timeout`` seconds, or little more.
        """
        self._hurry.set()
        self._decided.wait(self._timeout + 4 * self._interval)
        return self.lost if self.lost is not None and self.lost.rank != self._rank else None

    def last_seen(self) -> dict[int, str]:
        """The last sign of life of each rank that was looked at."""
        return self._signs.last_seen()

    def stop(self) -> None:
        """Leave on purpose: no rank counts this one as lost."""
        atexit.unregister(self._exit)
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=3 * self._interval + 2)

    def abandon(self) -> None:
        """Nobody can use the pipeline any more, and nobody closed it: let the threads end by themselves.

        The collector may call this in any thread and at any place, also where that thread holds a lock. So it takes
        none, and the threads see it some time later.
        """
        self._end, self._is_abandoned = DROPPED, True

    def _exit(self) -> None:
        """The process ends, and nobody closed the pipeline."""
        self._end = ENDED
        self.stop()

    def _leaves(self) -> bool:
        return self._is_abandoned or self._stop.is_set()

    # The threads

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the loop will see, too
            self._signs.write_ends(self._ends())
        while not self._leaves():
            try:
                self._once()
                self._answered = time.monotonic()
            except RuntimeError:  # what the store's client raises when the other side is gone
                left = any(map(self._signs.has_closed, range(self._ranks)))  # and the store with it
                if not self._leaves() and not left:
                    self._decide(LostRank(None, f"the store is gone, which {self._holder} held"))
                return
            self._hurry.wait(self._interval / 2 if self._signs.suspicious else self._interval)
            self._hurry.clear()
        with suppress(RuntimeError):  # there may be no store any more
            self._stay()
            if self._end:
                self._signs.write(self._position(), end=self._end)
            else:
                self._signs.write_closed()
        if self._is_abandoned:
            atexit.unregister(self._exit)

    def _once(self) -> None:
        self._signs.write(self._position())
        lost = self._news() if self.lost is None else self.lost
        if lost is not None:
            with suppress(RuntimeError):  # the loss counts, whatever becomes of the store
                self._signs.write_ends(self._ends())  # now with groups that were made meanwhile
                self._others |= self._signs.ends()  # later there may be no store
        if lost is not None and self.lost is None:
            self._decide(lost)
            self._signs.confirm()

    def _news(self) -> LostRank | None:
        """The loss that was told first, whether by another rank or by this one."""
        if self._told is None and (lost := self._signs.reported()) is not None:
            return lost
        self._signs.alarmed = self._signs.alarmed or self._closed()
        waits = self._waits()
        found = self._told or self._signs.look(self._position(), waits)
        if found is None and waits > self._step_timeout:
            what = f"the GPU of rank {self._rank} has been in one step for {waits:.0f} s, though all ranks are alive"
            found = LostRank(None, what)
        return None if found is None else self._signs.report(found)

    def _stay(self) -> None:
        """If the store ends with this process and a rank was lost: let the others hear of it first."""
        if self.lost is None or not self._holds_store:
            return
        end = time.monotonic() + 2 * self._interval + 1
        while not self._signs.all_confirmed(self.lost) and time.monotonic() < end:
            time.sleep(self._interval / 10)

    def _guard(self) -> None:
        while not self._stop.wait(self._interval) and not self._is_abandoned:
            silent = time.monotonic() - self._answered
            if self.lost is None and silent > self._timeout:
                what = f"the store, which {self._holder} holds, has not answered for {silent:.1f} s"
                self._decide(LostRank(None, what))
            if time.monotonic() - self._woken > _STUCK_SECONDS and self._position().action is not None:
                self._free(self._others)
                return

    def _decide(self, lost: LostRank) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = lost
        self._decided.set()
        if self._told is None:  # a rank that fails itself waits for nobody
            self._wake()
            self._woken = time.monotonic()
