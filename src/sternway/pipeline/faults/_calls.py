"""Which calls of the pipeline this rank has made, and whether another rank makes others.

All ranks make the same calls in the same order. One that makes a call alone (a norm or a checkpoint ``if rank == 0``, a
batch more than the others have) would wait for ever: the others are alive, and wait for it elsewhere. So calls have
numbers, and a rank's sign of life has its last one. Two names for one number cannot be right, whenever they are seen.
"""

from __future__ import annotations

_KEPT = 64  # more than ranks can be apart: none ends a step that another has not begun


class Calls:
    """The calls that one rank has made. Its own thread notes them, another one reads them."""

    def __init__(self) -> None:
        self._last: tuple[tuple[int, str], ...] = ((0, ""),)  # replaced as a whole, so that readers need no lock

    def note(self, name: str) -> None:
        """This rank makes a call for which it needs the others."""
        self._last = (*self._last[1 - _KEPT :], (self._last[-1][0] + 1, name))

    def last(self) -> tuple[int, str]:
        """The number and the name of the last one."""
        return self._last[-1]

    def other(self, number: int, name: str | None) -> tuple[str, str] | None:
        """A call of this rank and what a rank whose last call is ``number`` does in its place, if they differ.

        Args:
            number: of the other rank's last call.
            name: of that call; None if the rank has closed the pipeline after it.
        """
        mine = dict(self._last)
        if name is None:
            return (mine[number + 1], "close") if number + 1 in mine else None
        return (mine[number], name) if mine.get(number, name) != name else None
