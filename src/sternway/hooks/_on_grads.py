"""One call for several gradients: once per backward, and nothing is left of a backward that fails.

A backward is one call of the autograd engine, which numbers them. For each, a group of places keeps a ``_Run``: what
has arrived and what is still to come. Two questions decide the design.

*Who owns the run?* If the group did, a failed backward would leave its run behind. So the engine does: the run is a
callback for the end of the backward, and is freed with it, however it ends. The group has a weak reference. If
something expected has not arrived by the end, the callback calls the function with what has.

*What is still to come?* The engine tells, given the node. But a hook that holds nodes makes a reference cycle through
C++ that Python's garbage collector cannot see (node → hook → node), and the graph would never be freed. So:

    leaf            found by a weak reference to the tensor, which its AccumulateGrad node keeps alive
    tensor          found by a weak reference while the user keeps it, unless it was changed in place
    edge, or a      held by the next place above it in the graph; such references point downwards only, as the graph's
    tensor gone     own do, and make no cycle

A place that is alive but not found in one of these ways (the top one, in a backward that does not reach it) is known to
have no gradient only at the end of the backward, and the function is called then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakValueDictionary, ref

from torch import Tensor
from torch.autograd.graph import GradientEdge

from sternway._torch import require
from sternway._torch.autograd import at_end_of_backward, current_graph_task, edge_of, sequence_number, will_execute
from sternway._torch.tensors import version_of
from sternway.errors import HookError
from sternway.hooks._handle import Handle
from sternway.hooks._places import Place, attach, resolve_all

Grad = Tensor | None


def on_grads(
    places: Place | Iterable[Place],
    fn: Callable[..., Any],
    mode: Literal["all", "any"] = "all",
) -> Handle:
    """Call ``fn`` once in each backward that reaches some of ``places``.

    Example:
        >>> a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> handle = on_grads([a, b], lambda grads: print(grads))
        >>> (2 * a + 3 * b).sum().backward()
        (tensor([2.]), tensor([3.]))
        >>> handle.remove()

    Args:
        places: tensors that require gradients, ``GradientEdge``s, or graph nodes with one output.
        fn: with "all", called as ``fn(grads)`` when the last gradient that this backward computes has arrived: a tuple
            with one entry for each place, None where no gradient arrived or an undefined one did. With "any", called as
            ``fn(grad)`` with the first gradient that is defined, or None at the end of a backward without one.
        mode: "all" or "any".

    Returns:
        A handle: ``remove()`` it, or use it in a ``with`` block.

    A backward is one call of ``backward`` or ``autograd.grad``; one inside another (a reentrant checkpoint) counts as
    its own. Tensor hooks that were registered earlier run first, and ``fn`` gets the gradients that they return. It
    must not change them. What it returns is ignored; what it raises stops the backward.

    Raises:
        HookError: no gradient can arrive at one of the places.
    """
    require("hooks")
    resolved = resolve_all(places)
    if mode not in ("all", "any"):
        raise HookError('mode must be "all" or "any"', got=repr(mode), fix="pass one of the two")
    if not callable(fn):
        raise HookError(
            "fn must be a function of the gradients",
            got=f"a {type(fn).__name__}",
            fix="pass something that can be called",
        )
    group = _Group(fn, mode)
    watchers = [_Watcher(group, index, place) for index, place in enumerate(resolved)]
    inner: dict[Any, list[_Watcher]] = {}
    for watcher, place in zip(watchers, resolved, strict=True):
        if watcher.leaf is None:
            inner.setdefault(place.grad_fn if isinstance(place, Tensor) else place.node, []).append(watcher)
    for below, above in pairwise(sorted(inner, key=sequence_number)):
        for watcher in inner[above]:
            watcher.below, watcher.at_below = below, frozenset(lower.index for lower in inner[below])
    group.watchers = [ref(watcher) for watcher in watchers]
    return Handle([attach(place, watcher) for place, watcher in zip(resolved, watchers, strict=True)], group.stop)


class _Watcher:
    """The hook at one place. Only the graph (or the leaf) holds it, so it is freed with the place."""

    __slots__ = ("__weakref__", "at_below", "below", "group", "index", "leaf", "tensor", "version")

    def __init__(self, group: _Group, index: int, place: Tensor | GradientEdge) -> None:
        self.group, self.index = group, index
        self.leaf = ref(place) if isinstance(place, Tensor) and place.is_leaf else None
        self.tensor = ref(place) if isinstance(place, Tensor) and not place.is_leaf else None
        self.version = version_of(place) if isinstance(place, Tensor) else 0
        self.below: Any = None  # the next lower node that has places, and which those are
        self.at_below: frozenset[int] = frozenset()

    def node(self) -> Any:
        """This place's node, if it can be found without holding it."""
        if self.leaf is not None:
            leaf = self.leaf()
            return None if leaf is None else edge_of(leaf).node
        tensor = self.tensor() if self.tensor is not None else None
        # A tensor that was changed in place has another node than the one with the hook.
        return tensor.grad_fn if tensor is not None and version_of(tensor) == self.version else None

    def __call__(self, grad: Grad) -> None:
        self.group.arrive(self.index, grad)


class _Run:
    """One backward, as one group sees it."""

    __slots__ = ("__weakref__", "done", "grads", "group", "waiting")

    def __init__(self, group: _Group, waiting: set[int]) -> None:
        self.group, self.waiting = group, waiting
        self.grads: list[Grad] = [None] * len(group.watchers)
        self.done = False

    def __call__(self) -> None:
        """The backward is over: call the function, unless that was done."""
        self.group.finish(self)


class _Group:
    """The places of one ``on_grads``, and the backwards that are under way."""

    def __init__(self, fn: Callable[..., Any], mode: str) -> None:
        self.fn, self.first_only = fn, mode == "any"
        self.watchers: list[ref[_Watcher]] = []
        self.runs: WeakValueDictionary[int, _Run] = WeakValueDictionary()
        self.lock = threading.Lock()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def arrive(self, index: int, grad: Grad) -> None:
        if self.stopped:
            return
        number = current_graph_task()
        with self.lock:
            run = self.runs.get(number)
            if run is None:
                run = _Run(self, set() if self.first_only else self.to_come(index))
                at_end_of_backward(run)
                self.runs[number] = run
            if run.done:
                return
            run.grads[index] = grad
            run.waiting.discard(index)
            run.done = ready = grad is not None if self.first_only else not run.waiting
        if ready:
            self.call(run, grad)

    def finish(self, run: _Run) -> None:
        with self.lock:
            late, run.done = not run.done and not self.stopped, True
        if late:
            self.call(run, None)

    def call(self, run: _Run, grad: Grad) -> None:
        grads, run.grads = run.grads, []
        self.fn(grad if self.first_only else tuple(grads))

    def to_come(self, here: int) -> set[int]:
        """The places that this backward will reach, or may reach."""
        living = {watcher.index: watcher for known in self.watchers if (watcher := known()) is not None}
        held = {index: watcher.below for watcher in living.values() for index in watcher.at_below}
        expected = {here}
        for index, watcher in living.items():
            node = held.get(index)
            if node is None:
                node = watcher.node()
            if node is None or will_execute(node):
                expected.add(index)
        return expected
