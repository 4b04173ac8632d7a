"""W's of several threads that share parameters take turns.

autograd locks a parameter while it adds to its ``.grad``. W mostly adds without autograd, and reads whether there is a
``.grad``, so that two of them at once would lose gradients. A W that is called inside a backward, by a hook, does not
wait: it could wait for the W that the hook is of, since hooks may run on another thread than their backward.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

from sternway._torch.autograd import current_graph_task
from sternway.split._part import Node

_ended = threading.Condition()
_running: list[tuple[int, Set[Node]]] = []  # the thread and the leaves of each W that runs


@contextmanager
def turn(leaves: Set[Node]) -> Iterator[None]:
    """A block that writes to the gradients of these leaves; it begins when no block of another thread does."""
    own = threading.get_ident(), leaves
    with _ended:
        if current_graph_task() == -1:
            while any(thread != own[0] and not leaves.isdisjoint(others) for thread, others in _running):
                _ended.wait()
        _running.append(own)
    try:
        yield
    finally:
        with _ended:
            del _running[next(index for index, each in enumerate(_running) if each is own)]
            _ended.notify_all()
