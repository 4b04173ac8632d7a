"""One step of an offloader: what is where, and what happened in which order.

    packed ─▶ here ─send─▶ in flight ─release─▶ away ─ask─▶ coming ─take─▶ used
                │              │ used before it was released: no copy back
                └── used       └──▶

A round lasts from the first slot that is packed to the moment when no slot is alive: a step, with as many microbatches
as it has. Only this class moves bytes from one queue to another; when to do so is decided by the ``Offloader``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from sternway.saved._content import SavedBytes
from sternway.saved._plan import PACK, USE, Access, Record
from sternway.saved.stores._store import Store


class _Queue:
    """Saved bytes in the order in which they came, and how many they are together."""

    __slots__ = ("_items", "nbytes")

    def __init__(self) -> None:
        self._items: dict[int, SavedBytes] = {}
        self.nbytes = 0

    def add(self, content: SavedBytes) -> None:
        self._items[content.number] = content
        self.nbytes += content.nbytes

    def discard(self, content: SavedBytes) -> None:
        if self._items.pop(content.number, None) is not None:
            self.nbytes -= content.nbytes

    def __contains__(self, content: SavedBytes) -> bool:
        return content.number in self._items

    def __iter__(self) -> Iterator[SavedBytes]:
        return iter(list(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)

    def first(self) -> SavedBytes | None:
        """The oldest one."""
        return next(iter(self._items.values()), None)


class Round:
    """One step, while it runs."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.accesses: list[Access] = []
        self.marks: list[Any] = []  # when each access was, if that is measured
        self.alive: dict[int, SavedBytes] = {}
        self.here = _Queue()  # on the device and not sent
        self.flights = _Queue()  # sent, still on the device
        self.coming = _Queue()  # on the way back
        self.used: set[int] = set()
        self._order: list[int] = []  # of use, expected
        self._place: dict[int, int] = {}  # in that order
        self._next = 0  # the place of what is to be asked for next

    # Out

    def admit(self, content: SavedBytes) -> None:
        """A new slot is packed."""
        number = len(self.sizes)
        content.enter(number)
        self.sizes.append(content.nbytes)
        self.alive[number] = content
        self.here.add(content)
        self.accesses.append((PACK, number))

    def send(self, content: SavedBytes, store: Store) -> None:
        """Start to move it; it stays on the device if the store has no room."""
        sent = content.send(store)
        self.here.discard(content)
        if sent:
            self.flights.add(content)

    def release(self, content: SavedBytes) -> None:
        """Drop what was sent from the device."""
        self.flights.discard(content)
        content.release()
        if content.number not in self.used:  # it may have been passed by while it was here
            self._next = min(self._next, self._place.get(content.number, self._next))

    # Back

    def use(self, content: SavedBytes, order: Iterable[int]) -> bool:
        """Note a use; whether it is the slot's first. ``order`` is how the last round used its slots."""
        number = content.number
        first = number not in self.used
        if first:
            self.used.add(number)
            self.accesses.append((USE, number))
        if number not in self._place:  # what the last round did not have comes in the reverse order of packing
            known = dict.fromkeys(order)
            self._order = [*known, *(number for number in reversed(self.alive) if number not in known)]
            self._place = {number: place for place, number in enumerate(self._order)}
            self._next = 0
        return first

    def fetch(self, content: SavedBytes) -> Tensor:
        """The bytes on the device."""
        last = content.use()
        data = content.data
        if data is None:
            if content.arrival is None:
                self.ask(content)
            data = content.join()
            if last:
                self.coming.discard(content)
                content.taken()
        elif last and content in self.flights:  # it is used from where it is; the copy goes on
            content.keep_until_copied()
            self.release(content)
        self._next = max(self._next, self._place[content.number] + 1)
        return data

    def ask(self, content: SavedBytes) -> None:
        """Start to bring it back."""
        content.ask()
        self.coming.add(content)

    def next_away(self) -> SavedBytes | None:
        """What will be used next of all that is off the device and not asked for."""
        while self._next < len(self._order):
            number = self._order[self._next]
            content = self.alive.get(number)
            if content is not None and content.data is None and content.arrival is None and number not in self.used:
                return content
            if number >= len(self.sizes):
                return None  # not packed yet: a microbatch to come
            self._next += 1
        return None

    # The end, and the record

    def mark(self, mark: Any) -> None:
        """Note when the latest access was."""
        self.marks.append(mark)

    def record(self) -> Record:
        """The round as it went."""
        return Record(tuple(self.sizes), tuple(self.accesses))

    def drop(self, content: SavedBytes) -> bool:
        """The slot is gone; whether it was part of this round."""
        content.free()
        self.here.discard(content)
        self.flights.discard(content)
        self.coming.discard(content)
        return self.alive.pop(content.number, None) is not None
