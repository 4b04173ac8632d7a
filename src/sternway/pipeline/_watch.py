"""Find a rank that died, stopped or hangs, tell every other one, and wake those that wait for it.

A process that dies closes its connections, and whoever waits for it wakes with an error, but does not know who it was.
One that is stopped keeps them open, and nobody wakes. So every rank has a thread that gives a sign of life through the
store, with what the rank is doing, and reads that of the rank after it: a ring, so that a thousand ranks cost each no
more than two. A rank whose sign does not change for ``heartbeat_timeout`` seconds is lost. Whoever finds that, or fails
itself, writes the first word on it into the store; all others read it there and cut their own connections, which wakes
them.

The store is held by one process, and may be what is lost: a second thread, which touches nothing but the clock, notices
that the first one gets no answer. If that process learns of a loss, it stays until the others have heard of it, too.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Spot:
    """What a rank is doing: an action of a stage in a step, or none."""

    step: int | None = None
    stage: int | None = None
    action: str | None = None

    def __str__(self) -> str:
        if self.action is None:
            return f"after step {self.step}" if self.step is not None else "before the first step"
        return f"stage {self.stage}, at {self.action} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Which rank was lost, doing what, and how that was noticed."""

    rank: int | None
    what: str
    spot: Spot = Spot()

    def __str__(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank} ({self.spot})"
        return f"{who}: {self.what}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Loss:
        content = json.loads(text)
        return Loss(content["rank"], content["what"], Spot(**content["spot"]))


class Watch:
    """Args:
    store: torch's store; a connection of our own is made to what is under it.
    prefix: under which to write there, the same on every rank and in no other pipeline.
    rank: this one.
    ranks: how many there are.
    heartbeat_timeout: for how many seconds a rank may give no sign of life.
    holder: who holds the store, in words.
    holds: whether it is this process.
    wake: called once when a rank is lost, to wake those that wait.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        ranks: int,
        heartbeat_timeout: float,
        holder: str,
        holds: bool,
        wake: Callable[[], None],
    ) -> None:
        self.spot: Callable[[], Spot] = Spot  # what this rank is doing
        self.awaited: Callable[[int], Spot | None] = lambda rank: None  # what another has not done yet, as known here
        self.loss: Loss | None = None
        self._prefix, self._base = prefix, _connection(store, heartbeat_timeout)
        self._store = PrefixStore(prefix, self._base)
        self._rank, self._ranks, self._heartbeat_timeout, self._holder, self._wake_all = (
            rank,
            ranks,
            heartbeat_timeout,
            holder,
            wake,
        )
        self._holds = holds
        self.interval = min(1.0, heartbeat_timeout / 6)
        self._count = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._suspicious = False  # since a connection was lost: then
        self._asked: set[int] = set()  # ranks that were looked at, and
        self._alive: set[int] = set()  # those that gave a sign of life after that
        self._told: Loss | None = None
        self._answered = time.monotonic()
        self._decided, self._stop, self._hurry = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=f"sternway-{name}", daemon=True)
            for name, target in (("beat", self._beat), ("guard", self._guard))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)  # a thread that is in the store's code when Python ends would bring it down

    # For the rank's own thread

    def tell(self, what: str) -> None:
        """This rank fails: let the others know, unless one failed before."""
        self._told = Loss(self._rank, what, self.spot())
        self._hurry.set()
        self._decided.wait(self._heartbeat_timeout)

    def cause(self) -> Loss:
        """A connection was lost: which rank was it? Answers within ``heartbeat_timeout`` seconds or little more."""
        self._suspicious = True
        self._hurry.set()
        self._decided.wait(self._heartbeat_timeout + 4 * self.interval)
        return self.loss or Loss(None, "a connection was lost")

    def others(self) -> dict[int, str]:
        """The signs of life that were seen of the other ranks."""
        return {rank: sign for rank, (sign, _) in self._seen.items()}

    def stop(self) -> None:
        """Leave in good order: nobody takes this rank for lost."""
        atexit.unregister(self.stop)
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=3 * self.interval + 2)

    # The threads

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._once()
                self._answered = time.monotonic()
            except RuntimeError:  # what the store's client raises when the other side is gone
                if not self._stop.is_set() and not self._holder_left():
                    self._decide(Loss(None, f"the store is gone, with {self._holder}, which held it"))
                return
            self._hurry.wait(self.interval / 2 if self._suspicious else self.interval)
            self._hurry.clear()
        with suppress(RuntimeError):  # there may be nobody left to read it
            self._stay()
            self._store.set(f"beat/{self._rank}", CLOSED)

    def _stay(self) -> None:
        """If the store ends with this process and a rank was lost: let the others hear of it first, if they can."""
        if self.loss is None or not self._holds:
            return
        others = [f"heard/{rank}" for rank in range(self._ranks) if rank not in (self._rank, self.loss.rank)]
        end = time.monotonic() + 2 * self.interval + 1
        while others and not self._store.check(others) and time.monotonic() < end:
            time.sleep(self.interval / 10)

    def _guard(self) -> None:
        while not self._stop.wait(self.interval):
            silent = time.monotonic() - self._answered
            if silent > self._heartbeat_timeout:
                self._decide(Loss(None, f"the store, which {self._holder} holds, has not answered for {silent:.1f} s"))
                return

    def _once(self) -> None:
        self._count += 1
        sign = {"count": self._count, "spot": asdict(self.spot())}
        self._store.set(f"beat/{self._rank}", json.dumps(sign))
        if self.loss is not None:
            return
        if (loss := self._news()) is not None:
            self._decide(loss)
            self._store.set(f"heard/{self._rank}", "")

    def _news(self) -> Loss | None:
        """The first word on a loss, whether it is another rank's or this one's own."""
        if self._told is None and self._store.check(["error"]):
            return Loss.from_json(self._store.get("error").decode())
        found = self._told or self._look()
        if found is None:
            return None
        return Loss.from_json(self._store.compare_set("error", "", found.to_json()).decode())

    def _look(self) -> Loss | None:
        """Has the next rank stopped giving signs of life? If a connection was lost: has any, or do all go on?"""
        if not self._suspicious:
            others = [(self._rank + 1) % self._ranks]
            return next((loss for rank in others if (loss := self._missing(rank, self._heartbeat_timeout))), None)
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            if (loss := self._missing(rank, min(self._heartbeat_timeout, max(1.0, 3 * self.interval)))) is not None:
                return loss
        if all(rank in self._alive for rank in others):
            return Loss(self._rank, "it lost a connection to another rank, though all give signs of life", self.spot())
        return None

    def _missing(self, rank: int, limit: float) -> Loss | None:
        """A rank whose sign of life has not changed for ``limit`` seconds."""
        key, now = f"beat/{rank}", time.monotonic()
        sign = self._store.get(key).decode() if self._store.check([key]) else ""
        if rank not in self._seen or self._seen[rank][0] != sign:
            if self._suspicious and rank in self._asked:
                self._alive.add(rank)
            self._seen[rank] = sign, now
        if self._suspicious:
            self._asked.add(rank)
        silent = now - self._seen[rank][1]
        if silent <= limit or sign == CLOSED:
            return None
        spot = self.awaited(rank) or (Spot(**json.loads(sign)["spot"]) if sign else Spot())
        return Loss(rank, f"no sign of life for {silent:.1f} s; it died, was stopped, or hangs", spot)

    def _decide(self, loss: Loss) -> None:
        with self._lock:
            if self.loss is not None:
                return
            self.loss = loss
        self._decided.set()
        if self._told is None:  # a rank that fails itself waits for nobody
            self._wake_all()

    def _holder_left(self) -> bool:
        """Whether the store ended in good order, with a rank that had closed its pipeline."""
        return any(sign == CLOSED for sign, _ in self._seen.values())


def _connection(store: Any, heartbeat_timeout: float) -> Any:
    """A client of one's own, so that no other thread's waiting holds it up."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    client = store.clone() if hasattr(store, "clone") else store
    client.set_timeout(timedelta(seconds=max(1.0, heartbeat_timeout)))
    return client
