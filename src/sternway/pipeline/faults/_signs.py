"""Signs of life: each rank writes its own into the store, and reads those of others.

A rank reads the sign of the next rank only. The ranks form a ring, so the cost per rank does not grow with their
number. After a connection was lost, a rank reads the signs of all, and waits for less time, to find out who it was.
A connection that is seen to be closed, though nobody waits on it, is less than that: perhaps a rank left on purpose.
A process that ends without closing its pipeline, or drops it, is lost as soon as somebody waits for it, or makes a call
that it did not make. One that makes other calls than this rank is not lost, but neither can go on (``_calls.py``).

No threads and no waiting here: ``_watch.py`` calls this, and tests call it with a clock of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sternway.pipeline.faults._calls import Calls
from sternway.pipeline.faults._lost import LostRank, Position

_CLOSED = "closed"  # and the number of the last call; other signs are JSON
ENDED = "its process ended without closing the pipeline"
DROPPED = "its pipeline was dropped without being closed"


class SignsOfLife:
    """One rank's side.

    Args:
        store: a store of torch.distributed, with a prefix that no other pipeline uses.
        rank: this rank.
        ranks: how many there are.
        timeout: a rank whose sign does not change for so many seconds is lost.
        clock: the time in seconds.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout, self.interval = timeout, min(1.0, timeout / 6)
        self.suspicious = False  # set once a connection was lost
        self.alarmed = False  # set once a connection was seen to be closed
        self.calls = Calls()  # that this rank has made
        self.awaited: Callable[[int], Position | None] = lambda rank: None  # what this rank waits for from another
        self._store, self._rank, self._ranks, self._clock = store, rank, ranks, clock
        self._count, self._waits = 0, 0.0
        self._seen: dict[int, tuple[str, float]] = {}  # each rank's last sign, and when it was new
        self._asked: set[int] = set()  # ranks that were looked at since a connection was lost
        self._alive: set[int] = set()  # those of them whose sign has changed after that

    def write(self, position: Position, *, end: str = "") -> None:
        """Write a new sign of this rank; with ``end``, the last one, and why."""
        self._count += 1
        content = {"count": self._count, "position": asdict(position), "end": end, "call": self.calls.last()}
        self._store.set(f"beat/{self._rank}", json.dumps(content))

    def write_closed(self) -> None:
        """Write that this rank leaves on purpose, so that no rank counts it as lost."""
        self._store.set(f"beat/{self._rank}", f"{_CLOSED} {self.calls.last()[0]}")

    def look(self, position: Position, waits: float = 0.0) -> LostRank | None:
        """The rank that was lost, if the signs say so.

        Args:
            position: this rank's own.
            waits: for how many seconds its GPU has been in one step.
        """
        self._waits = waits
        following = (self._rank + 1) % self._ranks
        if not self.suspicious and not self.alarmed:
            return self._missing(following, self.timeout) or self._apart(following)
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            self._read(rank)
        for rank in others:
            if (apart := self._apart(rank)) is not None:
                return apart
        left = any(self.has_closed(rank) for rank in others)  # that closes connections, too
        for rank in others:
            if (lost := self._missing(rank, self._limit(rank, left))) is not None:
                return lost
        if self.suspicious and all(rank in self._alive for rank in others):
            return LostRank(self._rank, "its connection to another rank was lost, though all ranks are alive", position)
        return None

    def _limit(self, rank: int, left: bool) -> float:
        """How long a rank may be silent after a connection was closed. Whoever waits for it knows best where it was."""
        if left and not self.suspicious:
            return self.timeout
        patience = 3 if self.suspicious or self.awaited(rank) is not None else 5
        return min(self.timeout, max(1.0, patience * self.interval))

    def _read(self, rank: int) -> str:
        """A rank's sign now."""
        key = f"beat/{rank}"
        sign = self._store.get(key).decode() if self._store.check([key]) else ""
        if rank not in self._seen or self._seen[rank][0] != sign:
            if rank in self._asked:
                self._alive.add(rank)
            self._seen[rank] = sign, self._clock()
        if self.suspicious:
            self._asked.add(rank)
        return sign

    def _missing(self, rank: int, limit: float) -> LostRank | None:
        """A rank whose sign has not changed for ``limit`` seconds."""
        sign = self._read(rank)
        silent = self._clock() - self._seen[rank][1]
        if sign.startswith(_CLOSED):
            return None
        content: dict[str, Any] = json.loads(sign) if sign else {"position": {}, "end": ""}
        position = Position(**content["position"])
        if content["end"]:
            is_called = self.calls.last()[0] > content["call"][0]  # by this rank, and it will not make that call
            needed = self.suspicious or is_called or min(silent, self._waits) > self._limit(rank, False)
            return LostRank(rank, content["end"], position) if needed else None
        if silent <= limit:
            return None
        what = f"no sign of life for {silent:.1f} s: it died, was stopped, or hangs"
        if (awaited := self.awaited(rank)) is not None:
            return LostRank(rank, what, awaited)
        return LostRank(rank, what, position, exact=False)

    def has_closed(self, rank: int) -> bool:
        """Whether a rank has left on purpose, as far as was seen."""
        return rank in self._seen and self._seen[rank][0].startswith(_CLOSED)

    def _apart(self, rank: int) -> LostRank | None:
        """A rank that makes another call than this one, by the sign that was read last."""
        sign = self._seen[rank][0]
        if not sign:
            return None
        number, name = (int(sign.split()[1]), None) if self.has_closed(rank) else json.loads(sign)["call"]
        if (found := self.calls.other(number, name)) is None:
            return None
        return LostRank(None, f"{found[0]} on rank {self._rank}, {found[1]} on rank {rank}", apart=True)

    # What the ranks tell each other about a loss

    def report(self, lost: LostRank) -> LostRank:
        """Tell all ranks of a loss; the one that was told first, which may be another rank's."""
        return LostRank.from_json(self._store.compare_set("error", "", lost.to_json()).decode())

    def reported(self) -> LostRank | None:
        """The loss that a rank told of, if any."""
        return LostRank.from_json(self._store.get("error").decode()) if self._store.check(["error"]) else None

    def write_ends(self, addresses: list[str]) -> None:
        """Write this rank's side of its connections, by which others find those that lead to it."""
        self._store.set(f"ends/{self._rank}", json.dumps(addresses))

    def ends(self) -> set[str]:
        """What the other ranks wrote of theirs."""
        keys = [f"ends/{rank}" for rank in range(self._ranks) if rank != self._rank]
        found = (self._store.get(key).decode() for key in keys if self._store.check([key]))
        return {address for text in found for address in json.loads(text)}

    def confirm(self) -> None:
        """Say that this rank knows of the loss."""
        self._store.set(f"heard/{self._rank}", "")

    def all_confirmed(self, lost: LostRank) -> bool:
        """Whether every other rank that is left knows of the loss."""
        others = [f"heard/{rank}" for rank in range(self._ranks) if rank not in (self._rank, lost.rank)]
        return not others or bool(self._store.check(others))

    def last_seen(self) -> dict[int, str]:
        """The last sign of each rank that was looked at."""
        return {rank: sign for rank, (sign, _) in self._seen.items()}
