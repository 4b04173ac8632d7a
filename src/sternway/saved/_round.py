"""One step of an engine, as it goes."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from sternway.saved._plan import Event
from sternway.saved._report import Line
from sternway.saved._slot import Slot
from sternway.saved._store import Arrival, Away


class Gone(NamedTuple):
    """What a slot leaves behind."""

    number: int
    size: int
    away: Away | None
    payload: Tensor | None
    line: Line


class Round:
    """One step, as it goes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.events: list[Event] = []
        self.marks: list[Any] = []
        self.here: dict[int, weakref.ref[Slot]] = {}  # on the device and not sent, oldest first
        self.here_bytes = 0
        self.flights: dict[int, weakref.ref[Slot]] = {}  # sent, still on the device, oldest first
        self.flight_bytes = 0
        self.coming: dict[int, Arrival] = {}
        self.coming_bytes = 0
        self.slots: dict[int, weakref.ref[Slot]] = {}
        self.used: set[int] = set()
        self.order: list[int] = []  # of use, expected
        self.place: dict[int, int] = {}  # in that order
        self.next = 0  # place in the order of what is asked back next
