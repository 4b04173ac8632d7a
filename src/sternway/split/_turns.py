"""W's of several threads that share parameters take turns.

autograd locks a parameter while it adds to its ``.grad``. W mostly adds without autograd, and reads whether there is a
``.grad``, so that two of them at once would lose gradients. A W that is called inside a backward, by a hook, does not
wait for one that runs hooks: it could be the one that the hook is of, since hooks may run on another thread than their
backward. By then that one adds through autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

from sternway._torch.autograd import current_graph_task
from sternway.split._part import Node

_changed = threading.Condition()


class Turn:
    """A W that runs: its thread, its leaves, and whether it has come to the hooks."""

    __slots__ = ("leaves", "runs_hooks", "thread")

    def __init__(self, leaves: Set[Node]) -> None:
        self.thread, self.leaves, self.runs_hooks = threading.get_ident(), leaves, False

    def comes_to_hooks(self) -> None:
        """Say that hooks may run from now on, which may run other W's."""
        with _changed:
            self.runs_hooks = True
            _changed.notify_all()

    def must_wait(self, inside: bool) -> bool:
        """Whether some other W must end before this one begins, which is called ``inside`` a backward or not."""
        return any(
            other.thread != self.thread
            and not (inside and other.runs_hooks)
            and not self.leaves.isdisjoint(other.leaves)
            for other in _running
        )


_running: list[Turn] = []


@contextmanager
def turn(leaves: Set[Node]) -> Iterator[Turn]:
    """A block that writes to the gradients of these leaves; it begins when no block of another thread does."""
    own = Turn(leaves)
    with _changed:
        while _running and own.must_wait(inside=current_graph_task() != -1):
            _changed.wait()
        _running.append(own)
    try:
        yield own
    finally:
        with _changed:
            _running.remove(own)  # compared by identity
            _changed.notify_all()
