"""Hooks that cannot be read off the graph, and how W notices that there may be some.

W adds a gradient straight to ``.grad`` where nothing happens to it on the way. On the way are the nodes between a
product and its parameter (a transpose, a cast) and the parameter's AccumulateGrad node. Whether a *node* has hooks can
be asked; whether somebody called ``register_hook`` on the *tensor* that a node made cannot.

But every hook takes a number from one counter. If only our own were taken since we last looked, nobody has put a hook
on anything, so that only nodes that were there when we last looked can have some. Nodes are numbered too, in the order
in which a thread makes them:

    ──── nodes ──────────────▶ horizon ──── nodes made since ────▶ now
         may have hooks:                    have none
         W goes through the engine          W may add to .grad

For the same reason I may ask the engine for the gradient at a cut that was made since. A graph whose hooks are put on
in its own forward is before the horizon by the time it is split. Training without such
hooks never moves the horizon. A number above the newest of this thread is another thread's, and tells nothing.
"""

from __future__ import annotations

import threading

from sternway._torch.autograd import newest_sequence_number, sequence_number
from sternway._torch.hooks import PROBING, has_node_hooks, hooks_registered
from sternway.split._part import Node


class UnseenHooks(threading.local):
    """Where hooks may be that cannot be read. Each thread has its own, since each numbers its nodes by itself."""

    def __init__(self) -> None:
        self._counted = 0  # of hooks_registered, when we last looked; our own since then included
        self.horizon = self._newest = -1
        self.since = object()  # another one whenever hooks of others were found
        self.clean: set[int] = set()  # ids of parameters without hooks on their AccumulateGrad node

    def look(self) -> None:
        """Move the horizon to now, if hooks were registered that are not our own."""
        counted, self._newest = hooks_registered(), newest_sequence_number()
        if counted != self._counted:
            self._counted = counted
            self.horizon = self._newest
            self.since = object()
            self.clean.clear()

    def count_own(self, hooks: int) -> None:
        """Say that we have registered some ourselves."""
        self._counted += hooks

    def unhooked(self) -> tuple[int, int]:
        """The numbers after which, and up to which, nodes are ``beyond``; until the next look."""
        return self.horizon, self._newest

    def beyond(self, node: Node) -> bool:
        """Whether a node was made after the horizon, by this thread as far as its number tells."""
        return self.horizon < sequence_number(node) <= self._newest

    def on_node(self, node: Node) -> bool:
        """Whether a node of a graph has hooks of its own."""
        if self.beyond(node):
            return False
        self.count_own(PROBING)
        return has_node_hooks(node)

    def on_leaf(self, leaf: Node) -> bool:
        """Whether an AccumulateGrad node has hooks of its own; such a node may be older than any graph."""
        key = id(leaf.variable)
        if key in self.clean:
            return False
        self.count_own(PROBING)
        if has_node_hooks(leaf):
            return True
        self.clean.add(key)
        return False


UNSEEN = UnseenHooks()


def forward_begins() -> None:
    """Say that a forward begins: hooks that exist by now are on nothing that it will make.

    To call it is optional. Without it the first backward after hooks were registered, anywhere, adds gradients to
    ``.grad`` through the autograd engine. With it, as all others do: one operation less, and the same bits.

    Example:
        >>> from sternway import split
        >>> split.forward_begins()
    """
    UNSEEN.look()
